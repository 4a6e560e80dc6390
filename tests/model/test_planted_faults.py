"""Mistakes that other engines made: each must move the oracle's logits far out of tolerance."""

import dataclasses

import numpy as np
import pytest
from small_models import LOGIT_TOLERANCE, prefill

from glm_gpu.batch import Batch
from glm_gpu.kernels.rope import rope_half
from glm_gpu.model import attention, indexer, moe
from glm_gpu.model.mtp import MtpHead
from glm_gpu.model.transformer import Transformer
from glm_gpu.quant import FORMATS, QuantizedMatrix, bf16_to_f32, f32_to_bf16


def _error(model: Transformer, expected: dict[str, np.ndarray]) -> float:
    output, _, _ = prefill(model, expected["input_ids"])
    return np.abs(output.logits - expected["logits"]).max()


def _with_layers(model: Transformer, change) -> Transformer:
    """The model with `change` applied to each layer's weights."""
    weights = dataclasses.replace(model.weights, layers=tuple(change(layer) for layer in model.weights.layers))
    return Transformer(model.config, weights, model.store, model.numerics)


def test_indexer_rope_that_pairs_halves_is_caught(tiny_glm, reference):
    """C01: right up to index_topk tokens, wrong beyond."""
    config = dataclasses.replace(tiny_glm.config, indexer_rope_interleave=False)
    faulty = Transformer(config, tiny_glm.weights, tiny_glm.store, tiny_glm.numerics)
    expected = reference("tiny_glm/reference.npz")
    assert _error(faulty, expected) > 1
    output, _, _ = prefill(faulty, expected["short_input_ids"])
    assert np.abs(output.logits - expected["short_logits"]).max() < LOGIT_TOLERANCE


def test_attention_rope_that_pairs_halves_is_caught(tiny_glm, reference, monkeypatch):
    monkeypatch.setattr(attention, "rope_interleaved", rope_half)
    assert _error(tiny_glm, reference("tiny_glm/reference.npz")) > 1


def test_router_without_division_by_the_sum_is_caught(tiny_glm, reference):
    config = dataclasses.replace(tiny_glm.config, norm_topk_prob=False)
    faulty = Transformer(config, tiny_glm.weights, tiny_glm.store, tiny_glm.numerics)
    assert _error(faulty, reference("tiny_glm/reference.npz")) > 1


def test_kv_b_with_keys_and_values_swapped_is_caught(tiny_glm, reference):
    num_heads, nope = tiny_glm.config.num_attention_heads, tiny_glm.config.qk_nope_head_dim

    def swap(layer):
        rows = layer.attention.kv_b.data.reshape(num_heads, -1, layer.attention.kv_b.shape[1])
        blocks = np.concatenate([rows[:, :nope].reshape(-1, rows.shape[2]), rows[:, nope:].reshape(-1, rows.shape[2])])
        kv_b = QuantizedMatrix(FORMATS["f32"], layer.attention.kv_b.shape, np.ascontiguousarray(blocks))
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, kv_b=kv_b))

    assert _error(_with_layers(tiny_glm, swap), reference("tiny_glm/reference.npz")) > 1


@pytest.mark.parametrize("change", ["bias in the weights", "no bias"])
def test_router_bias_in_the_wrong_place_is_caught(tiny_glm, reference, monkeypatch, change):
    right = moe.route

    def wrong(x, gate, bias, *rest):
        if change == "no bias":
            return right(x, gate, np.zeros_like(bias), *rest)
        ids, weights = right(x, gate, bias, *rest)
        biased = weights + bias[ids]
        return ids, (biased / biased.sum(1, keepdims=True) * weights.sum(1, keepdims=True)).astype(np.float32)

    monkeypatch.setattr(moe, "route", wrong)
    assert _error(tiny_glm, reference("tiny_glm/reference.npz")) > 0.1


def test_bias_rounded_to_bf16_is_caught(tiny_glm, monkeypatch):
    """C04: with biases of GLM's size, 7 +- 0.12, bf16 leaves 8 distinct values and other experts are chosen."""
    rng = np.random.default_rng(0)
    config = tiny_glm.config
    bias = (7 + 0.12 * rng.standard_normal(config.n_routed_experts)).astype(np.float32)
    weights = dataclasses.replace(tiny_glm.weights.layers[2].mlp, bias=bias)
    h = rng.standard_normal((10_000, config.hidden_size)).astype(np.float32)

    scores = 1 / (1 + np.exp(-(h.astype(np.float64) @ weights.gate.T.astype(np.float64)))) + bias.astype(np.float64)
    order = np.sort(scores, axis=1)
    clear = order[:, -config.num_experts_per_tok] - order[:, -config.num_experts_per_tok - 1] > 2e-6
    expected = np.sort(np.argsort(-scores, axis=1)[:, : config.num_experts_per_tok], axis=1)

    ids, _ = moe.choose_experts(h, weights, config)
    assert clear.mean() > 0.99
    assert np.array_equal(np.sort(ids, axis=1)[clear], expected[clear])

    rounded = dataclasses.replace(weights, bias=bf16_to_f32(f32_to_bf16(bias)))
    ids, _ = moe.choose_experts(h, rounded, config)
    assert (np.sort(ids, axis=1) != expected).any(axis=1).mean() > 0.05


def test_multi_token_layer_on_the_trunk_s_selection_is_caught(tiny_glm, reference):
    """C06: the layer must run its own indexer."""
    expected = reference("tiny_glm/reference.npz")
    output, _, trace = prefill(tiny_glm, expected["input_ids"])
    rows = trace.one("selection", tiny_glm.config.num_hidden_layers - 1)
    trunk = indexer.Selection(rows, (rows >= 0).sum(1).astype(np.int32))
    head = MtpHead(tiny_glm)
    cache = head.new_cache(len(rows), is_bf16=False)
    batch = Batch.of([(expected["mtp_input_ids"].tolist(), cache)], "prefill", all_logits=True)
    drafted, _ = head.forward(batch, output.hidden, [trunk])
    assert np.abs(drafted.logits - expected["mtp_logits"]).max() > 0.5
