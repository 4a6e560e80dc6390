"""The weights of both architectures: every name and shape a model needs, and the check that a folder has them."""

import logging
from collections.abc import Iterator

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError

log = logging.getLogger(__name__)

CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name, the draft layer's included; a tied model has no lm_head.

    Source: glm_moe_dsa and olmoe as published on the Hugging Face hub, experts one by one.
    """
    return {**dict(_trunk(config)), **dict(_draft_layer(config))}


def head_name(config: ModelConfig) -> str:
    """The weight that turns hidden states into logits: lm_head, or the embeddings of a tied model."""
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


def validate_tensors(config: ModelConfig, checkpoint) -> bool:
    """Check that every weight the model needs is there, in its shape and a readable type; reads no data.

    Args:
        config: what the model is.
        checkpoint: a Checkpoint; only its `path`, `in`, `info` and `weight_problem` are used.

    Returns:
        Whether the draft (MTP) layer is there too. Without it the model runs; an incomplete one is logged.

    Raises:
        CheckpointError: weights are missing (all counted, the first few named) or one has another shape or type.
    """
    _check(checkpoint, _trunk(config))
    _warn_of_rounded_biases(config, checkpoint)
    draft_layer = dict(_draft_layer(config))
    missing = [name for name in draft_layer if name not in checkpoint]
    if missing:
        if len(missing) < len(draft_layer):
            log.warning(
                "%s: the draft (MTP) layer is not used: %d of %d tensors are missing, first %s",
                checkpoint.path, len(missing), len(draft_layer), missing[0],
            )  # fmt: skip
        return False
    _check(checkpoint, draft_layer.items())
    return bool(draft_layer)


def _check(checkpoint, expected) -> None:
    missing = []
    for name, shape in expected:
        if name not in checkpoint:
            missing.append(name)
        elif not missing:
            problem = checkpoint.weight_problem(name, shape)
            if problem:
                raise CheckpointError(f"{checkpoint.path}: {problem}; fetch the model again, config.json included")
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} tensors that config.json asks for are missing: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}; "
            "fetch the model again, config.json included"
        )


def _warn_of_rounded_biases(config: ModelConfig, checkpoint) -> None:
    """A correction bias rounded to 16 bits chooses other experts for most tokens; nothing here can restore it."""
    if not config.is_latent:
        return
    names = [f"model.layers.{layer}.{CORRECTION_BIAS}" for layer in config.sparse_layers]
    rounded = [name for name in names if checkpoint.info(name).dtype != "F32"]
    if rounded:
        log.warning(
            "%s: %d of %d correction biases are not F32, first %s: routing is not the original model's",
            checkpoint.path, len(rounded), len(names), rounded[0],
        )  # fmt: skip


def _trunk(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _draft_layer(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.mtp_layer is None:
        return
    hidden = config.hidden_size
    prefix = f"model.layers.{config.mtp_layer}."
    yield prefix + "enorm.weight", (hidden,)
    yield prefix + "hnorm.weight", (hidden,)
    yield prefix + "eh_proj.weight", (hidden, 2 * hidden)
    yield from _layer(config, config.mtp_layer)
    yield prefix + "shared_head.norm.weight", (hidden,)


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    attention = _latent_attention(config) if config.is_latent else _explicit_attention(config)
    for name, shape in attention.items():
        yield f"{prefix}self_attn.{name}", shape
    if config.is_full_indexer(layer):
        for name, shape in _indexer(config).items():
            yield f"{prefix}self_attn.indexer.{name}", shape
    if not config.is_sparse(layer):
        yield from _mlp(prefix + "mlp.", hidden, config.intermediate_size)
        return
    yield prefix + "mlp.gate.weight", (config.n_routed_experts, hidden)
    if config.is_latent:
        yield prefix + CORRECTION_BIAS, (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
    if config.n_shared_experts:
        width = config.moe_intermediate_size * config.n_shared_experts
        yield from _mlp(prefix + "mlp.shared_experts.", hidden, width)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def _latent_attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    num_heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    return {
        "q_a_proj.weight": (config.q_lora_rank, config.hidden_size),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (num_heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.latent_width, config.hidden_size),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (num_heads * (nope + value), config.kv_lora_rank),
        "o_proj.weight": (config.hidden_size, num_heads * value),
    }


def _indexer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "wq_b.weight": (config.index_n_heads * config.index_head_dim, config.q_lora_rank),
        "wk.weight": (config.index_head_dim, config.hidden_size),
        "k_norm.weight": (config.index_head_dim,),
        "k_norm.bias": (config.index_head_dim,),
        "weights_proj.weight": (config.index_n_heads, config.hidden_size),
    }


def _explicit_attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, config.head_dim * config.num_attention_heads
    kv_width = config.head_dim * config.num_key_value_heads
    return {
        "q_proj.weight": (width, hidden),
        "k_proj.weight": (kv_width, hidden),
        "v_proj.weight": (kv_width, hidden),
        "o_proj.weight": (hidden, width),
        "q_norm.weight": (width,),
        "k_norm.weight": (kv_width,),
    }
