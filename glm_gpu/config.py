"""ModelConfig: config.json under Hugging Face's names, validated once."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from glm_gpu.config_fields import ConfigFields
from glm_gpu.errors import UnsupportedModelError
from glm_gpu.json_file import read_json_object

GLM = "glm_moe_dsa"
OLMOE = "olmoe"


@dataclass(frozen=True)
class ModelConfig:
    """What a model is: every size and switch that inference needs, already checked against the others.

    Fields are named as in config.json. OLMoE's `intermediate_size` and `num_experts` are found under the names GLM
    gives the same things, `moe_intermediate_size` and `n_routed_experts`. What an architecture lacks is 0, () or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_id: tuple[int, ...]
    # mixture of experts
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    mlp_layer_types: tuple[str, ...]
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    intermediate_size: int = 0
    # GLM: latent attention, indexer, draft layer
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    indexer_types: tuple[str, ...] = ()
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    indexer_rope_interleave: bool = True
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = True
    # OLMoE: explicit attention
    head_dim: int = 0
    clip_qkv: float | None = None
    # FP8 checkpoints: rows and columns that share a scale
    weight_block_size: tuple[int, int] = (128, 128)

    @classmethod
    def open(cls, model_dir: Path) -> "ModelConfig":
        """The config of a model folder.

        Raises:
            CheckpointError: config.json is missing or a field is missing, mistyped or out of range.
            UnsupportedModelError: the model is of a kind this program does not run.
        """
        path = Path(model_dir) / "config.json"
        return cls.from_dict(read_json_object(path), where=str(path))

    @classmethod
    def from_dict(cls, values: dict, where: str = "config.json") -> "ModelConfig":
        """The config that a parsed config.json holds; `where` names it in messages. Raises as `open` does."""
        fields = ConfigFields(values, where)
        model_type = fields.text("model_type")
        if model_type == GLM:
            return cls(model_type=model_type, **_common(fields), **_glm(fields))
        if model_type == OLMOE:
            return cls(model_type=model_type, **_common(fields), **_olmoe(fields))
        raise UnsupportedModelError(
            f"{where}: model_type {model_type!r} is not supported; this program runs {GLM!r} and {OLMOE!r}"
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers, without the draft (MTP) layer."""
        return self.num_hidden_layers

    @property
    def is_latent(self) -> bool:
        """Whether attention is GLM's latent attention with an indexer; otherwise explicit keys and values."""
        return self.model_type == GLM

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: nope and rope channels."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.is_latent else self.head_dim

    @property
    def latent_width(self) -> int:
        """Values cached for each token and layer by latent attention: the latent, then the rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mtp_layer(self) -> int | None:
        """Number of the draft layer, one behind the last decoder layer; None when the config has none."""
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Decoder layers that run an indexer of their own."""
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind == "full")

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Decoder layers with routed experts."""
        return tuple(layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts; the draft layer does."""
        return layer == self.mtp_layer or self.mlp_layer_types[layer] == "sparse"

    def is_full_indexer(self, layer: int) -> bool:
        """Whether a layer owns an indexer; the draft layer does, OLMoE's layers do not."""
        return self.is_latent and (layer == self.mtp_layer or self.indexer_types[layer] == "full")

    def index_owner(self, layer: int) -> int:
        """The layer whose selection a layer uses: itself, or the nearest full one before it."""
        assert self.is_latent, self.model_type
        while not self.is_full_indexer(layer):
            layer -= 1
        return layer


def _common(fields: ConfigFields) -> dict:
    fields.require("hidden_act", "silu", default="silu")
    fields.require("attention_bias", False, default=False)
    fields.require("mlp_bias", False, default=False)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    num_experts_per_tok = fields.integer("num_experts_per_tok", 1, 1 << 8, default=8)
    return {
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("hidden_size", 1, 1 << 16),
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, 1 << 9),
        "num_attention_heads": fields.integer("num_attention_heads", 1, 1 << 10),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, 1 << 26),
        "rms_norm_eps": fields.number("rms_norm_eps", 0.0, 0.1, default=1e-5),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "eos_token_id": fields.token_ids("eos_token_id", vocab_size),
        "num_experts_per_tok": num_experts_per_tok,
        "weight_block_size": _weight_block_size(fields),
    }


def _glm(fields: ConfigFields) -> dict:
    fields.require("scoring_func", "sigmoid", default="sigmoid")
    fields.require("topk_method", "noaux_tc", default="noaux_tc")
    fields.require("moe_router_dtype", "float32", default="float32")
    fields.require("moe_layer_freq", 1, default=1)
    fields.require("rope_interleave", True, default=True)
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 9)
    nope = fields.integer("qk_nope_head_dim", 1, 1 << 12)
    rope = fields.integer("qk_rope_head_dim", 2, 1 << 12, multiple_of=2)
    width = fields.integer("qk_head_dim", 1, 1 << 13, default=nope + rope)
    fields.check(
        width == nope + rope, "qk_head_dim", width, f"{nope} + {rope} as qk_nope_head_dim and qk_rope_head_dim"
    )
    index_head_dim = fields.integer("index_head_dim", 1, 1 << 12)
    fields.check(rope <= index_head_dim, "qk_rope_head_dim", rope, f"at most index_head_dim {index_head_dim}")
    indexer_types = _indexer_types(fields, num_layers)
    fields.check(indexer_types[0] == "full", "indexer_types", indexer_types[0], "layer 0 to be 'full'")
    return {
        # one latent is shared by all heads, whatever the file says
        "num_key_value_heads": 1,
        "rope_theta": fields.rope_theta(default=None),
        "intermediate_size": fields.integer("intermediate_size", 1, 1 << 20),
        "mlp_layer_types": _mlp_layer_types(fields, num_layers),
        "q_lora_rank": fields.integer("q_lora_rank", 1, 1 << 16),
        "kv_lora_rank": fields.integer("kv_lora_rank", 1, 1 << 16),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": fields.integer("v_head_dim", 1, 1 << 12),
        "indexer_types": indexer_types,
        "index_n_heads": fields.integer("index_n_heads", 1, 1 << 10),
        "index_head_dim": index_head_dim,
        "index_topk": fields.integer("index_topk", 1, 1 << 20),
        "indexer_rope_interleave": fields.flag("indexer_rope_interleave", default=True),
        "num_nextn_predict_layers": fields.integer("num_nextn_predict_layers", 0, 1, default=0),
        "index_share_for_mtp_iteration": fields.flag("index_share_for_mtp_iteration", default=True),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", 1, 1 << 20),
        "n_shared_experts": fields.integer("n_shared_experts", 1, 1 << 6, default=1),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 0.0, 1e6, default=2.5),
        **_experts(fields, "n_routed_experts", num_layers),
    }


def _olmoe(fields: ConfigFields) -> dict:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 9)
    hidden = fields.integer("hidden_size", 1, 1 << 16)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 10)
    fields.check(hidden % (2 * num_heads) == 0, "hidden_size", hidden, f"a multiple of 2 x {num_heads} heads")
    head_dim = fields.integer("head_dim", 1, 1 << 16, default=hidden // num_heads)
    fields.check(head_dim * num_heads == hidden, "head_dim", head_dim, f"hidden_size {hidden} / {num_heads} heads")
    kv_heads = fields.integer("num_key_value_heads", 1, 1 << 10, default=num_heads)
    fields.check(num_heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {num_heads} heads")
    experts = _experts(fields, "num_experts", num_layers)
    fields.check(experts["n_group"] == 1, "n_group", experts["n_group"], "1 for olmoe")
    return {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": fields.rope_theta(default=10000.0),
        "clip_qkv": None if fields.is_absent("clip_qkv") else fields.number("clip_qkv", 0.0, 1e6),
        "moe_intermediate_size": fields.integer("intermediate_size", 1, 1 << 20),
        "mlp_layer_types": ("sparse",) * num_layers,
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        **experts,
    }


def _experts(fields: ConfigFields, count_key: str, num_layers: int) -> dict:
    # a table of all experts is kept in memory: 2^18 is ten times what GLM-5.2 has
    num_experts = fields.integer(count_key, 1, (1 << 18) // num_layers)
    n_group = fields.integer("n_group", 1, num_experts, default=1)
    fields.check(num_experts % n_group == 0, "n_group", n_group, f"a divisor of {num_experts} experts")
    per_group = num_experts // n_group
    fields.check(n_group == 1 or per_group >= 2, "n_group", n_group, "groups of at least 2 experts")
    topk_group = fields.integer("topk_group", 1, n_group, default=1)
    fields.integer("num_experts_per_tok", 1, topk_group * per_group, default=8)
    return {"n_routed_experts": num_experts, "n_group": n_group, "topk_group": topk_group}


def _mlp_layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    if not fields.is_absent("mlp_layer_types"):
        return fields.choices("mlp_layer_types", num_layers, ("dense", "sparse"))
    num_dense = min(fields.integer("first_k_dense_replace", 0, 1 << 9, default=3), num_layers)
    return ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)


def _indexer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """Which layers own an indexer; without any of the keys all do (GLM-5, GLM-5.1).

    Source: transformers' GlmMoeDsaConfig; `indexer_types`, else `index_topk_pattern`, else frequency and offset.
    """
    if not fields.is_absent("indexer_types"):
        return fields.choices("indexer_types", num_layers, ("full", "shared"))
    if not fields.is_absent("index_topk_pattern"):
        letters = fields.choices("index_topk_pattern", num_layers, ("F", "S"))
        return tuple("full" if letter == "F" else "shared" for letter in letters)
    freq = fields.integer("index_topk_freq", 1, 1 << 9, default=1)
    offset = fields.integer("index_skip_topk_offset", 0, 1 << 9, default=2)
    is_full = (max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers))
    return tuple("full" if full else "shared" for full in is_full)


def _weight_block_size(fields: ConfigFields) -> tuple[int, int]:
    if fields.is_absent("quantization_config"):
        return (128, 128)
    nested = fields.nested("quantization_config")
    nested.require("quant_method", "fp8", default="fp8")
    nested.require("fmt", "e4m3", default="e4m3")
    if nested.is_absent("weight_block_size"):
        return (128, 128)
    return nested.integers("weight_block_size", 2, 1, 1 << 20)
