"""The whole model in float weights against the reference implementation's numbers."""

import numpy as np
import pytest
from small_models import LOGIT_TOLERANCE, decode, prefill

from glm_gpu.batch import Batch
from glm_gpu.model.mtp import MtpHead

CASES = [
    ("tiny_glm", "reference.npz"),
    ("tiny_glm", "reference_long.npz"),
    ("tiny_glm_fp8", "reference.npz"),
    ("tiny_olmoe", "reference.npz"),
]


@pytest.mark.parametrize(("folder", "file"), CASES)
def test_logits_and_greedy_tokens_are_the_reference_s(open_oracle, reference, folder, file):
    model, expected = open_oracle(folder), reference(f"{folder}/{file}")
    output, cache, _ = prefill(model, expected["input_ids"])
    assert np.abs(output.logits - expected["logits"]).max() < LOGIT_TOLERANCE
    ids, rows = decode(model, cache, output.logits[-1], 32)
    assert ids == expected["greedy_ids"].tolist()
    assert np.abs(rows - expected["greedy_logits"]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("folder", ["tiny_glm", "tiny_olmoe"])
def test_hidden_states_of_every_layer_are_the_reference_s(open_oracle, reference, folder):
    expected = reference(f"{folder}/reference.npz")
    output, _, trace = prefill(open_oracle(folder), expected["input_ids"])
    for layer, hidden in enumerate(expected["hidden_states"], start=-1):
        assert np.abs(trace.one("hidden", layer) - hidden).max() < 2e-5
    assert np.abs(output.hidden - expected["final_hidden"]).max() < 2e-5


@pytest.mark.parametrize("folder", ["tiny_glm", "tiny_glm_fp8", "tiny_olmoe"])
def test_router_choices_and_weights_are_the_reference_s(open_oracle, reference, folder):
    model, expected = open_oracle(folder), reference(f"{folder}/reference.npz")
    _, _, trace = prefill(model, expected["input_ids"])
    for layer, ids, weights in zip(
        model.config.sparse_layers, expected["router_ids"], expected["router_weights"], strict=True
    ):
        order = np.argsort(trace.one("router_ids", layer), axis=1)
        assert np.array_equal(np.take_along_axis(trace.one("router_ids", layer), order, 1), ids)
        assert np.abs(np.take_along_axis(trace.one("router_weights", layer), order, 1) - weights).max() < 1e-5


@pytest.mark.parametrize(("folder", "file"), [case for case in CASES if case[0] != "tiny_olmoe"])
def test_every_layer_uses_the_reference_s_selection(open_oracle, reference, folder, file):
    model, expected = open_oracle(folder), reference(f"{folder}/{file}")
    _, _, trace = prefill(model, expected["input_ids"])
    selections = dict(zip(expected["full_layers"].tolist(), expected["index_topk_sel"], strict=True))
    for layer, owner in enumerate(expected["index_owner"].tolist()):
        assert np.array_equal(trace.one("selection", layer), selections[owner])


def test_a_short_prompt_grows_past_index_topk_as_the_reference_does(tiny_glm, reference):
    expected = reference("tiny_glm/reference.npz")
    output, cache, _ = prefill(tiny_glm, expected["short_input_ids"])
    assert np.abs(output.logits - expected["short_logits"]).max() < LOGIT_TOLERANCE
    ids, rows = decode(tiny_glm, cache, output.logits[-1], 32)
    assert ids == expected["short_greedy_ids"].tolist()
    assert np.abs(rows - expected["short_greedy_logits"]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("folder", ["tiny_glm", "tiny_glm_fp8"])
def test_multi_token_head_is_the_reference_s(open_oracle, reference, folder):
    model, expected = open_oracle(folder), reference(f"{folder}/reference.npz")
    output, _, _ = prefill(model, expected["input_ids"])
    head = MtpHead(model)
    cache = head.new_cache(len(expected["mtp_input_ids"]), is_bf16=False)
    batch = Batch.of([(expected["mtp_input_ids"].tolist(), cache)], "prefill", all_logits=True)
    drafted, _ = head.forward(batch, output.hidden)
    assert np.abs(drafted.logits - expected["mtp_logits"]).max() < LOGIT_TOLERANCE
    assert np.abs(drafted.hidden - expected["mtp_hidden"]).max() < 2e-5


@pytest.mark.parametrize("chain", ["recompute", "share"])
def test_recurrent_drafts_are_the_reference_s(tiny_glm, reference, chain):
    expected = reference("tiny_glm/reference.npz")
    output, _, _ = prefill(tiny_glm, expected["input_ids"])
    head = MtpHead(tiny_glm)
    cache = head.new_cache(len(expected["mtp_input_ids"]) + 4, is_bf16=False)
    batch = Batch.of([(expected["mtp_input_ids"].tolist(), cache)], "prefill")
    drafted, selections = head.forward(batch, output.hidden)
    kept = [selection.last_row() for selection in selections]
    ids, rows = [], []
    for _ in range(4):
        rows.append(drafted.logits[0])
        ids.append(int(np.argmax(drafted.logits[0])))
        batch = Batch.of([([ids[-1]], cache)], "decode")
        drafted, _ = head.forward(batch, drafted.hidden[-1:], kept if chain == "share" else None)
    assert ids == expected[f"mtp_chain_ids_{chain}"].tolist()
    assert np.abs(rows - expected[f"mtp_chain_logits_{chain}"]).max() < LOGIT_TOLERANCE
