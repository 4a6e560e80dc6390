import numpy as np
import pytest
from small_models import prefill

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.errors import CheckpointError
from glm_gpu.model.transformer import Transformer
from glm_gpu.model.weights import StreamedLayers, load_weights
from glm_gpu.recipe import Recipe


def test_streamed_layers_give_the_same_bits(oracle_dir, open_oracle, reference):
    ids = reference("tiny_glm/reference.npz")["input_ids"][:20]
    resident = open_oracle("tiny_glm", Recipe.default())
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        weights = load_weights(checkpoint, checkpoint.config, Recipe.default(), with_mtp=True, stream_layers=True)
        streamed = Transformer(checkpoint.config, weights, resident.store, resident.numerics)
        for _ in range(2):
            assert np.array_equal(prefill(streamed, ids)[0].logits, prefill(resident, ids)[0].logits)


def test_streamed_layers_hold_at_most_two_and_read_each_once_a_pass():
    loaded = []

    def load(layer: int) -> str:
        loaded.append(layer)
        return f"layer {layer}"

    layers = StreamedLayers(load, 5)
    for _ in range(2):
        assert [layers[n] for n in range(5)] == [f"layer {n}" for n in range(5)]
        assert len(layers._layers) <= 2
    assert [layers[n] for n in range(5)][-1] == "layer 4"
    assert loaded[:15] == [0, 1, 2, 3, 4] * 3


def test_a_streamed_layer_that_cannot_be_read_is_read_again_in_the_next_pass():
    failures = [CheckpointError("unreadable")]

    def load(layer: int) -> int:
        if failures:
            raise failures.pop()
        return layer

    layers = StreamedLayers(load, 3)
    with pytest.raises(CheckpointError):
        layers[0]
    assert [layers[n] for n in range(3)] == [0, 1, 2]
