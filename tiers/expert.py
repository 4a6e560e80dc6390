"""One expert's bytes, from a checkpoint into a slab."""

import numpy as np

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.kernels.quantize import quantizer
from glm_gpu.recipe import Recipe, Rounding
from glm_gpu.slab import SlabLayout

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def expert_tensor(layer: int, expert: int, projection: str) -> str:
    """The Hugging Face name of one of an expert's three matrices."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def expert_layout(checkpoint: Checkpoint, recipe: Recipe, layer: int) -> SlabLayout:
    """How the experts of a layer lie in their slabs: as they are stored, or else as the recipe says."""
    config = checkpoint.config
    name = expert_tensor(layer, 0, PROJECTIONS[0])
    format, stored = recipe.format_for(name, config), checkpoint.stored(name)
    if stored is not None and format.is_packed:
        return SlabLayout(stored.format, config.hidden_size, config.moe_intermediate_size, stored.scale_dtype)
    return SlabLayout(format, config.hidden_size, config.moe_intermediate_size)


def read_expert(
    checkpoint: Checkpoint, layout: SlabLayout, layer: int, expert: int, slab: np.ndarray, rounding: Rounding
) -> None:
    """Fill a slab with an expert, quantized here where the checkpoint does not store it so.

    Args:
        slab: [layout.nbytes] uint8, overwritten.
        rounding: how numbers are put into the slab's format.

    Raises:
        CheckpointError: a tensor cannot be read, or holds values that are not finite.
    """
    for projection, view in zip(PROJECTIONS, layout.views(slab), strict=True):
        name = expert_tensor(layer, expert, projection)
        matrix = checkpoint.read_matrix(name, view.shape, view.format, quantizer=quantizer(rounding))
        view.data[...] = matrix.data
        if view.scales is not None:
            view.scales[...] = matrix.scales
