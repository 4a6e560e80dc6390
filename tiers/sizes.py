"""What a model takes in memory, weight by weight, known before any weight is read."""

from dataclasses import dataclass

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.quant import Format
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.slab import SlabLayout
from glm_gpu.tensors import expected_tensors
from glm_gpu.tiers.expert import expert_layout

# Bytes a weight while a whole tensor is decoded to f32: as stored, the values, whether they are finite; FP8 needs two
# more copies, of whole blocks. None: packed weights asked for as plain numbers.
_DECODE_BYTES = {"F8_E4M3": 16, "BF16": 7, "F16": 7, "F32": 5, None: 9}
# While it is quantized: the values, and copies of at most 2^19 of them at a time; bf16 is made at once.
_QUANTIZE_BLOCK, _QUANTIZE_BYTES, _BF16_BYTES = 1 << 19, 10, 15
# While scales are searched: the matrix rounded to nearest, and on NumPy errors in f64 of so many weights at a time.
_NEAREST_BYTES, _SEARCH_BLOCK, _SEARCH_BYTES = 2, 1 << 17, 56


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model's parts, exact for every width.

    Attributes:
        end_bytes: embeddings, head and final norm.
        layer_bytes: [L], each layer's weights without routed experts; the multi-token layer is the last, 0 if unused.
        slab_nbytes: [L], one expert of each layer; 0 in layers without experts.
        slot_nbytes: [L], the same in whole pages: what a place in memory for it takes.
        num_experts, experts_per_tok: E and K.
        end_load_bytes, layer_load_bytes: the most that loading one weight of the ends, or of a layer, takes beside it.
        read_bytes: the most that a thread takes beside the slot while it reads an expert.
    """

    end_bytes: int
    layer_bytes: tuple[int, ...]
    slab_nbytes: tuple[int, ...]
    slot_nbytes: tuple[int, ...]
    num_experts: int
    experts_per_tok: int
    end_load_bytes: int = 0
    layer_load_bytes: int = 0
    read_bytes: int = 0

    @property
    def dense_bytes(self) -> int:
        """Every weight but the routed experts."""
        return self.end_bytes + sum(self.layer_bytes)

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return sum(self.slab_nbytes) * self.num_experts

    @property
    def sparse_layers(self) -> list[int]:
        """Layers with routed experts."""
        return [layer for layer, nbytes in enumerate(self.slab_nbytes) if nbytes]


def model_sizes(checkpoint: Checkpoint, recipe: Recipe, with_mtp: bool) -> ModelSizes:
    """The sizes of a checkpoint's weights in the formats they will have in memory; reads no weights.

    Args:
        with_mtp: count the multi-token layer.
    """
    config = checkpoint.config
    num_layers = config.num_hidden_layers + 1
    layer_bytes = [0] * num_layers
    end_bytes = end_load_bytes = layer_load_bytes = 0
    for name, shape in expected_tensors(config).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        is_unused = layer == config.num_hidden_layers and not with_mtp
        if is_unused or tensor_class(name, config) in ("expert", "mtp_expert"):
            continue
        num_bytes, beside = _weight_bytes(checkpoint, recipe, name, shape)
        if layer is None:
            end_bytes, end_load_bytes = end_bytes + num_bytes, max(end_load_bytes, beside)
        else:
            layer_bytes[layer] += num_bytes
            layer_load_bytes = max(layer_load_bytes, beside)
    layouts = _layouts(checkpoint, recipe, with_mtp)
    return ModelSizes(
        end_bytes,
        tuple(layer_bytes),
        tuple(layouts[n].nbytes if n in layouts else 0 for n in range(num_layers)),
        tuple(layouts[n].aligned_nbytes if n in layouts else 0 for n in range(num_layers)),
        config.n_routed_experts,
        config.num_experts_per_tok,
        end_load_bytes,
        layer_load_bytes,
        max(_read_bytes(checkpoint, layer, layout) for layer, layout in layouts.items()),
    )


def _layouts(checkpoint: Checkpoint, recipe: Recipe, with_mtp: bool) -> dict[int, SlabLayout]:
    config = checkpoint.config
    layers = [*config.sparse_layers, *([config.mtp_layer] if with_mtp else [])]
    return {layer: expert_layout(checkpoint, recipe, layer) for layer in layers}


def _weight_bytes(checkpoint: Checkpoint, recipe: Recipe, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(bytes in memory, most bytes held beside them while it is loaded)."""
    format, scale_nbytes = recipe.format_for(name, checkpoint.config), 4
    stored = checkpoint.stored(name)
    if stored is not None and format.is_packed:
        format, scale_nbytes = stored.format, stored.scale_dtype.itemsize
    matrix = shape if len(shape) == 2 else (1, shape[0])
    num_bytes = format.data_nbytes(*matrix) + format.scale_count(*matrix) * scale_nbytes
    if name not in checkpoint or (stored is not None and format.is_packed):
        return num_bytes, 0
    return num_bytes, _decode_bytes(checkpoint, name, matrix[0] * matrix[1], format)


def _decode_bytes(checkpoint: Checkpoint, name: str, num_weights: int, format: Format) -> int:
    """Bytes that decoding one weight, and bringing it into its format, takes beside the result."""
    dtype = None if checkpoint.stored(name) is not None else checkpoint.info(name).dtype
    decoding = num_weights * _DECODE_BYTES[dtype]
    if format.name == "f32":  # the decoded values are the result
        return decoding - num_weights * 4
    if format.name == "bf16":
        return max(decoding, num_weights * _BF16_BYTES) - num_weights * 2
    blocks = max(min(num_weights, _QUANTIZE_BLOCK) * _QUANTIZE_BYTES, min(num_weights, _SEARCH_BLOCK) * _SEARCH_BYTES)
    return max(decoding, num_weights * (4 + _NEAREST_BYTES) + blocks)


def _read_bytes(checkpoint: Checkpoint, layer: int, layout: SlabLayout) -> int:
    name = f"model.layers.{layer}.mlp.experts.0.gate_proj.weight"
    if checkpoint.stored(name) is not None and layout.format.is_packed:
        return layout.aligned_nbytes + 2 * 4096  # a direct read that is not aligned goes through a buffer
    # the matrix that is read, and the one before it
    return layout.nbytes * 2 // 3 + _decode_bytes(checkpoint, name, layout.hidden * layout.width, layout.format)
