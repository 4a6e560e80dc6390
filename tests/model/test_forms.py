"""Two ways to compute the same thing: absorbed and explicit attention, selection forced and skipped."""

import numpy as np
import pytest
from small_models import prefill

from glm_gpu.model.indexer import Selection, joined
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


def test_selections_of_several_sequences_join_whatever_form_and_width_they_have():
    dense = Selection(None, np.int32([2, 3]))
    listed = Selection(np.int32([[1, 4, 6, -1, -1]]), np.int32([3]))
    both = joined([dense, listed])
    assert both.rows.tolist() == [[0, 1, -1, -1, -1], [0, 1, 2, -1, -1], [1, 4, 6, -1, -1]]
    assert both.counts.tolist() == [2, 3, 3] and both.rows.dtype == np.int32
    assert joined([dense, dense]).rows is None and joined([dense, dense]).counts.tolist() == [2, 3, 2, 3]
