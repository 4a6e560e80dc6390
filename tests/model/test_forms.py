"""Two ways to compute the same thing: absorbed and explicit attention, selection forced and skipped."""

import numpy as np
import pytest
from small_models import prefill

from glm_gpu.model.numerics import Numerics
from glm_gpu.recipe import Recipe

FORMATS = {"f32": Recipe.float32(), "four bits": Recipe.default()}


@pytest.mark.parametrize("recipe", FORMATS)
def test_absorbed_and_explicit_attention_agree(open_oracle, reference, recipe):
    """In float weights to rounding. With packed weights the two forms round different operands to int16 (2e-5 each)."""
    ids = reference("tiny_glm/reference.npz")["input_ids"]
    absorbed, _, _ = prefill(open_oracle("tiny_glm", FORMATS[recipe]), ids)
    explicit, _, _ = prefill(open_oracle("tiny_glm", FORMATS[recipe], Numerics(explicit_prefill=True)), ids)
    assert np.abs(absorbed.logits - explicit.logits).max() < (5e-5 if recipe == "f32" else 5e-3)


def test_explicit_attention_follows_a_sparse_selection(open_oracle, reference):
    expected = reference("tiny_glm/reference_long.npz")
    output, _, _ = prefill(open_oracle("tiny_glm", numerics=Numerics(explicit_prefill=True)), expected["input_ids"])
    assert np.abs(output.logits - expected["logits"]).max() < 5e-4


@pytest.mark.parametrize("recipe", FORMATS)
def test_forcing_the_indexer_changes_no_bit_up_to_index_topk(open_oracle, reference, recipe):
    ids = reference("tiny_glm/reference.npz")["input_ids"][:16]
    skipped = open_oracle("tiny_glm", FORMATS[recipe])
    forced = open_oracle("tiny_glm", FORMATS[recipe], Numerics(always_index=True))
    assert len(ids) == skipped.config.index_topk
    assert np.array_equal(prefill(skipped, ids)[0].logits, prefill(forced, ids)[0].logits)
