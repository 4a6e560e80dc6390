"""Which class a tensor belongs to, and which format each class gets."""

from dataclasses import dataclass, replace
from typing import Literal

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.quant import FORMATS, Format

# How a packed weight's scales are chosen: by the largest magnitude (round to nearest), or searched for least error.
Rounding = Literal["rtn", "search"]
# Lower perplexity on the demo's held-out texts and lower logit error on the reference fixture at every width that has
# candidates; `bench/rounding.py` prints both.
DEFAULT_ROUNDING: Rounding = "search"

_F32 = FORMATS["f32"]
_FLOAT_SUFFIXES = (
    "norm.weight",
    "norm.bias",
    ".mlp.gate.weight",
    ".e_score_correction_bias",
    ".indexer.weights_proj.weight",
)
_EMBEDDING_SUFFIXES = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")


def tensor_class(name: str, config: ModelConfig) -> str:
    """The class of a weight, which decides its format.

    Returns:
        "float"       norms, router, biases, the indexer's weights_proj: never rounded
        "expert"      routed experts' three matrices
        "dense"       attention, dense and shared MLPs
        "embedding"   embed_tokens and lm_head
        "indexer"     the indexer's wq_b and wk, in whichever layer
        "mtp_expert", "mtp"   routed experts and other matrices of the draft layer

    Raises:
        CheckpointError: the name belongs to no class; every weight of both architectures does.
    """
    if name.endswith(_FLOAT_SUFFIXES):  # "norm.weight" also covers model.norm, enorm, q_a_layernorm, ...
        return "float"
    if name.endswith(_EMBEDDING_SUFFIXES):
        return "embedding"
    if not (name.startswith("model.layers.") and name.endswith(".weight")):
        raise CheckpointError(
            f"tensor {name!r} belongs to no known class of weights; convert a {config.model_type} model"
        )
    is_mtp = config.mtp_layer is not None and name.startswith(f"model.layers.{config.mtp_layer}.")
    if ".self_attn.indexer." in name:
        return "indexer"
    if ".mlp.experts." in name:
        return "mtp_expert" if is_mtp else "expert"
    return "mtp" if is_mtp else "dense"


@dataclass(frozen=True)
class Recipe:
    """One format for each class of weights, class "float" being always f32, and how weights are rounded into them."""

    expert: Format
    dense: Format
    embedding: Format
    indexer: Format
    mtp_expert: Format
    mtp: Format
    rounding: Rounding = DEFAULT_ROUNDING

    @classmethod
    def default(cls) -> "Recipe":
        """Experts and dense weights int4 in groups of 64; embeddings, head, indexer and draft layer int8 rows."""
        return cls.from_bits(4, 4, 64)

    @classmethod
    def from_bits(cls, expert_bits: int, dense_bits: int, group: int) -> "Recipe":
        """The recipe for bit widths as options give them.

        Embeddings, head, indexer and the draft layer stay at int8 for widths up to 8 and are bf16 at 16.

        Args:
            expert_bits: 16, 8, 4 or 2, for routed experts.
            dense_bits: the same, for attention, dense and shared MLPs.
            group: columns that share a scale at 4 bits: 64, 128, or 0 for whole rows.

        Raises:
            RequestError: a width or group that no format has.
        """
        expert = _format_of(expert_bits, group)
        dense = _format_of(dense_bits, group)
        wide = FORMATS["bf16"] if dense_bits == 16 else FORMATS["int8"]
        wide_expert = FORMATS["bf16"] if expert_bits == 16 else FORMATS["int8"]
        return cls(expert, dense, embedding=wide, indexer=wide, mtp_expert=wide_expert, mtp=wide)

    @classmethod
    def float32(cls) -> "Recipe":
        """Everything as f32: the reference."""
        return cls(*[_F32] * 6)

    def rounded(self, rounding: Rounding) -> "Recipe":
        """The same formats, rounded otherwise."""
        return replace(self, rounding=rounding)

    def format_for(self, name: str, config: ModelConfig) -> Format:
        """The format of a weight by its name. Raises as `tensor_class` does."""
        name_class = tensor_class(name, config)
        return _F32 if name_class == "float" else getattr(self, name_class)


def _format_of(bits: int, group: int) -> Format:
    if group not in (0, 64, 128):
        raise RequestError(f"group {group} is not supported; choose 64, 128, or 0 for one scale a row")
    names = {16: "bf16", 8: "int8", 4: f"int4_g{group}" if group else "int4", 2: "int2"}
    if bits not in names:
        raise RequestError(f"{bits} bits a weight are not supported; choose 16, 8, 4, or 2")
    return FORMATS[names[bits]]
