"""Write a slice of GLM-5.2 (bench/make_slice.py) as GGUF, so that llama.cpp runs the same numbers beside this engine.

Matrices in groups of 64 become Q4_0, whose blocks of 32 hold the same integers with the same scale in half precision;
matrices with a scale a row become Q8_0; the rest stays F32. kv_b becomes BF16 (3 % of a token's bytes): the format
wants its keys transposed, and llama.cpp's AMX kernels abort on three dimensions of Q4_0 or F16. Tensors are streamed.
The file has no vocabulary: time it, do not talk to it.

Needs: gguf.

    python bench/make_slice.py --out slice --layers 4 --experts 96
    python tools/slice_to_gguf.py slice slice.gguf
    llama-bench -m slice.gguf -p 512 -n 32 -t 2
    python bench/decode.py slice
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.quant import QuantizedMatrix, dequantize, unpack
from glm_gpu.recipe import Recipe
from glm_gpu.tensors import expected_tensors

BLOCK = 32
Tensor = tuple[str, tuple[int, ...], Type, Callable[[], np.ndarray]]

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}


def q4_0(matrix: QuantizedMatrix) -> np.ndarray:
    """[O, I / 32 * 18] uint8: a half-precision scale, then byte j holds column j low and column j + 16 high."""
    stored = (unpack(matrix) + 8).astype(np.uint8).reshape(len(matrix.data), -1, 2, BLOCK // 2)
    blocks = np.empty((*stored.shape[:2], 2 + BLOCK // 2), np.uint8)
    scales = np.repeat(matrix.scales, matrix.format.group // BLOCK, axis=1)[:, : stored.shape[1]]
    blocks[:, :, :2] = np.ascontiguousarray(scales, np.float16).view(np.uint8).reshape(*stored.shape[:2], 2)
    blocks[:, :, 2:] = stored[:, :, 0] | stored[:, :, 1] << 4
    return blocks.reshape(len(blocks), -1)


def q8_0(matrix: QuantizedMatrix) -> np.ndarray:
    """[O, I / 32 * 34] uint8: a half-precision scale, then 32 bytes."""
    stored = matrix.data.reshape(len(matrix.data), -1, BLOCK)
    blocks = np.empty((*stored.shape[:2], 2 + BLOCK), np.uint8)
    blocks[:, :, :2] = matrix.scales.astype(np.float16).view(np.uint8)[:, None]
    blocks[:, :, 2:] = stored
    return blocks.reshape(len(blocks), -1)


def tensors(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """Every tensor of the GGUF file: name, shape in rows, type, and what makes its bytes."""
    config, recipe = checkpoint.config, Recipe.default()
    shapes = expected_tensors(config)

    def packed(name: str) -> np.ndarray:
        matrix = checkpoint.read_matrix(name, shapes[name], recipe.format_for(name, config))
        return q4_0(matrix) if matrix.format.group else q8_0(matrix)

    def plain(name: str, new: str) -> Tensor:
        shape = shapes[name]
        if recipe.format_for(name, config).name == "f32":
            return new, shape, Type.F32, lambda: checkpoint.read_f32(name)
        return new, shape, Type.Q4_0 if recipe.format_for(name, config).group else Type.Q8_0, lambda: packed(name)

    yield plain("model.embed_tokens.weight", "token_embd.weight")
    yield plain("model.norm.weight", "output_norm.weight")
    yield plain("lm_head.weight", "output.weight")
    for layer in range(config.num_hidden_layers):
        prefix, new_prefix = f"model.layers.{layer}.", f"blk.{layer}."
        for suffix, new in NAMES.items():
            if prefix + suffix in shapes:
                yield plain(prefix + suffix, new_prefix + new)
        yield from _latent(checkpoint, f"{prefix}self_attn.kv_b_proj.weight", new_prefix)
        for part in ("gate", "up", "down") if layer in config.sparse_layers else ():
            names = [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in range(config.n_routed_experts)]
            shape = (len(names), *shapes[names[0]])
            yield f"{new_prefix}ffn_{part}_exps.weight", shape, Type.Q4_0, lambda n=names: np.stack([*map(packed, n)])


def _latent(checkpoint: Checkpoint, name: str, prefix: str) -> Iterator[Tensor]:
    """kv_b as two tensors in bfloat16: keys [H, R, N], transposed, and values [H, A, R]."""
    config = checkpoint.config
    heads, nope, value, rank = (
        config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    )  # fmt: skip

    def matrices() -> np.ndarray:
        shape = (heads * (nope + value), rank)
        stored = checkpoint.read_matrix(name, shape, Recipe.default().format_for(name, config))
        return dequantize(stored).reshape(heads, nope + value, rank)

    def keys() -> np.ndarray:
        return gguf.quants.quantize(np.ascontiguousarray(matrices()[:, :nope].transpose(0, 2, 1)), Type.BF16)

    def values() -> np.ndarray:
        return gguf.quants.quantize(np.ascontiguousarray(matrices()[:, nope:]), Type.BF16)

    yield f"{prefix}attn_k_b.weight", (heads, rank, nope), Type.BF16, keys
    yield f"{prefix}attn_v_b.weight", (heads, value, rank), Type.BF16, values


def add_parameters(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """config.json under GGUF's names."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)  # absorbed attention has one key head
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_leading_dense_block_count(config.num_hidden_layers - len(config.sparse_layers))
    writer.add_vocab_size(config.vocab_size)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.latent_width)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_indexer_head_count(config.index_n_heads)
    writer.add_indexer_key_length(config.index_head_dim)
    writer.add_indexer_top_k(config.index_topk)
    full = [config.is_full_indexer(layer) for layer in range(config.num_hidden_layers)]
    writer.add_array("glm-dsa.attention.indexer.types", full)
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a slice of GLM-5.2 as GGUF.")
    parser.add_argument("slice", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    writer = gguf.GGUFWriter(args.out, "glm-dsa")
    with Checkpoint.open(args.slice) as checkpoint:
        add_parameters(writer, checkpoint.config)
        rows = list(tensors(checkpoint))
        for name, shape, type, _ in rows:
            block, nbytes = gguf.GGML_QUANT_SIZES[type]
            stored = shape if type == Type.F32 else (*shape[:-1], shape[-1] // block * nbytes)
            dtype = np.dtype(np.float32 if type == Type.F32 else np.uint8)
            writer.add_tensor_info(name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for *_, make in rows:
            writer.write_tensor_data(make())
    writer.close()


if __name__ == "__main__":
    main()
