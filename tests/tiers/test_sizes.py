"""Sizes told beforehand against what is there after loading."""

import dataclasses

import numpy as np
import pytest
from peak_memory import peak_bytes

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.model.weights import load_weights
from glm_gpu.quant import QuantizedMatrix
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.expert import expert_layout, read_expert
from glm_gpu.tiers.sizes import model_sizes

RECIPES = {
    "default": Recipe.default(),
    "f32": Recipe.float32(),
    "bf16": Recipe.from_bits(16, 16, 64),
    "mixed": Recipe.from_bits(2, 8, 0),
}


def held_bytes(value) -> int:
    """Bytes of every array in a tree of dataclasses and tuples."""
    if isinstance(value, np.ndarray | QuantizedMatrix):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(held_bytes, value))
    if dataclasses.is_dataclass(value):
        return sum(held_bytes(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0


@pytest.mark.parametrize("model", ["tiny_glm", "tiny_glm_fp8", "tiny_olmoe"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_sizes_are_those_of_the_loaded_weights(oracle_dir, model, recipe):
    with Checkpoint.open(oracle_dir / model) as checkpoint:
        config = checkpoint.config
        with_mtp = config.mtp_layer is not None
        sizes = model_sizes(checkpoint, recipe, with_mtp)
        weights = load_weights(checkpoint, config, recipe, with_mtp)
        for layer, layer_weights in enumerate(weights.layers):
            assert sizes.layer_bytes[layer] == held_bytes(layer_weights)
        assert sizes.layer_bytes[config.num_hidden_layers] == held_bytes(weights.mtp)
        tied = 0 if config.tie_word_embeddings else held_bytes(weights.head)
        assert sizes.end_bytes == held_bytes(weights.embedding) + held_bytes(weights.norm) + tied
        for layer in sizes.sparse_layers:
            layout = expert_layout(checkpoint, recipe, layer)
            assert (sizes.slab_nbytes[layer], sizes.slot_nbytes[layer]) == (layout.nbytes, layout.aligned_nbytes)


def test_sizes_leave_an_unused_draft_layer_out(oracle_dir):
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        sizes = model_sizes(checkpoint, Recipe.default(), with_mtp=False)
    assert sizes.layer_bytes[-1] == sizes.slab_nbytes[-1] == sizes.slot_nbytes[-1] == 0


@pytest.mark.parametrize("model", ["tiny_glm", "tiny_glm_fp8"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_reading_an_expert_takes_no_more_than_planned(oracle_dir, model, recipe):
    with Checkpoint.open(oracle_dir / model) as checkpoint:
        sizes = model_sizes(checkpoint, recipe, with_mtp=False)
        layer = sizes.sparse_layers[0]
        layout = expert_layout(checkpoint, recipe, layer)
        slab = np.empty(layout.nbytes, np.uint8)
        read_expert(checkpoint, layout, layer, 0, slab, recipe.rounding)  # imports and first-use caches
        bound = sizes.read_bytes + 12_000  # Python's own objects
        assert peak_bytes(lambda: read_expert(checkpoint, layout, layer, 1, slab, recipe.rounding), bound) <= bound
