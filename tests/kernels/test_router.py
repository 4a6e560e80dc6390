import math

import numpy as np
import pytest

from glm_gpu.kernels.router import route, route_softmax

pytestmark = pytest.mark.usefixtures("implementation")


def sigmoid_reference(x, gate, bias, experts_per_tok, n_group, topk_group, norm_topk_prob, scale):
    """Section 6 of glm_moe_dsa.md in float64, an expert at a time."""
    num_experts = len(gate)
    scores = [1 / (1 + math.exp(-float(np.dot(x.astype(float), row)))) for row in gate.astype(float)]
    choice = [s + float(b) for s, b in zip(scores, bias, strict=True)]
    size = num_experts // n_group
    if n_group > 1:
        strength = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        kept = sorted(range(n_group), key=lambda g: (-strength[g], g))[:topk_group]
    else:
        kept = [0]
    allowed = [e for e in range(num_experts) if e // size in kept]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[:experts_per_tok]
    weights = [scores[e] for e in ids]
    total = sum(weights) + 1e-20 if norm_topk_prob else 1.0
    return ids, [w / total * scale for w in weights]


def softmax_reference(x, gate, experts_per_tok, norm_topk_prob):
    logits = [float(np.dot(x.astype(float), row)) for row in gate.astype(float)]
    total = sum(math.exp(v - max(logits)) for v in logits)
    probabilities = [math.exp(v - max(logits)) / total for v in logits]
    ids = sorted(range(len(logits)), key=lambda e: (-probabilities[e], e))[:experts_per_tok]
    weights = [probabilities[e] for e in ids]
    return ids, [w / sum(weights) if norm_topk_prob else w for w in weights]


def case(num_tokens, num_experts, width, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, width)).astype(np.float32)
    gate = (rng.standard_normal((num_experts, width)) / math.sqrt(width)).astype(np.float32)
    bias = rng.standard_normal(num_experts).astype(np.float32) * np.float32(0.2)
    return x, gate, bias


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(
    "num_experts, experts_per_tok, n_group, topk_group", [(16, 4, 1, 1), (24, 3, 4, 2), (256, 8, 1, 1), (33, 8, 1, 1)]
)
@pytest.mark.parametrize("width", [31, 68, 576])
def test_choice_and_weights_follow_section_6(num_experts, experts_per_tok, n_group, topk_group, width, norm_topk_prob):
    x, gate, bias = case(17, num_experts, width)
    arguments = (gate, bias, experts_per_tok, n_group, topk_group, norm_topk_prob, 2.5)
    ids, weights = route(x, *arguments)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    for t in range(len(x)):
        expected_ids, expected_weights = sigmoid_reference(x[t], *arguments)
        assert ids[t].tolist() == expected_ids
        np.testing.assert_allclose(weights[t], expected_weights, rtol=3e-6)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("num_experts, width", [(8, 31), (64, 68), (64, 2048)])
def test_softmax_choice_and_weights(num_experts, width, norm_topk_prob):
    x, gate, _ = case(17, num_experts, width)
    ids, weights = route_softmax(x, gate, 8, norm_topk_prob)
    for t in range(len(x)):
        expected_ids, expected_weights = softmax_reference(x[t], gate, 8, norm_topk_prob)
        assert ids[t].tolist() == expected_ids
        np.testing.assert_allclose(weights[t], expected_weights, rtol=3e-6)


def test_equal_scores_go_to_the_lowest_id():
    x = np.zeros((1, 16), dtype=np.float32)
    gate = np.ones((12, 16), dtype=np.float32)
    bias = np.zeros(12, dtype=np.float32)
    bias[[3, 7, 9]] = 1
    assert route(x, gate, bias, 5, 1, 1, True, 1.0)[0].tolist() == [[3, 7, 9, 0, 1]]
    assert route(x, gate, np.zeros(12, dtype=np.float32), 4, 4, 2, True, 1.0)[0].tolist() == [[0, 1, 2, 3]]
    assert route_softmax(x, gate, 4, False)[0].tolist() == [[0, 1, 2, 3]]


def test_bias_steers_the_choice_but_is_no_weight():
    x, gate, _ = case(1, 8, 32)
    bias = np.zeros(8, dtype=np.float32)
    bias[5] = 100
    ids, weights = route(x, gate, bias, 1, 1, 1, False, 1.0)
    assert ids.tolist() == [[5]]
    assert weights[0, 0] == pytest.approx(1 / (1 + math.exp(-float(x[0].astype(float) @ gate[5].astype(float)))))


def test_refused_groups_are_never_chosen_even_over_negative_scores():
    x = np.zeros((1, 4), dtype=np.float32)
    gate = np.zeros((6, 4), dtype=np.float32)
    # Group 0 wins by its two best; its third expert is below every refused expert, and below 0.
    bias = np.float32([5, 5, -9, 1, 1, 1])
    assert route(x, gate, bias, 3, 2, 1, True, 1.0)[0].tolist() == [[0, 1, 2]]


def test_a_group_is_judged_by_its_two_best_experts():
    x = np.zeros((1, 4), dtype=np.float32)
    gate = np.zeros((6, 4), dtype=np.float32)
    bias = np.float32([3, 0, 0, 2, 2, -9])
    assert route(x, gate, bias, 2, 2, 1, True, 1.0)[0].tolist() == [[3, 4]]


def test_weights_sum_to_the_scale_after_normalising():
    x, gate, bias = case(5, 32, 64)
    np.testing.assert_allclose(route(x, gate, bias, 8, 1, 1, True, 2.5)[1].sum(axis=1), 2.5, rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 63])
@pytest.mark.parametrize("width", [33, 576])
def test_a_row_has_the_same_bits_alone(num_tokens, width):
    x, gate, bias = case(num_tokens, 24, width)
    together = route(x, gate, bias, 4, 4, 2, True, 2.5)
    together_softmax = route_softmax(x, gate, 4, True)
    for t in range(num_tokens):
        one = slice(t, t + 1)
        for both, alone in (
            (together, route(x[one], gate, bias, 4, 4, 2, True, 2.5)),
            (together_softmax, route_softmax(x[one], gate, 4, True)),
        ):
            np.testing.assert_array_equal(both[0][one], alone[0])
            np.testing.assert_array_equal(both[1][one], alone[1])


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 63])
@pytest.mark.parametrize("num_experts, width", [(8, 31), (24, 33), (40, 576), (256, 1000)])
def test_choice_and_weights_have_the_same_bits_everywhere(num_tokens, num_experts, width, same_bits):
    x, gate, bias = case(num_tokens, num_experts, width)
    for norm_topk_prob in (False, True):
        same_bits(lambda norm=norm_topk_prob: route(x, gate, bias, 4, 4, 2, norm, 2.5))
        same_bits(lambda norm=norm_topk_prob: route(x, gate, bias, 8, 1, 1, norm, 2.5))
        same_bits(lambda norm=norm_topk_prob: route_softmax(x, gate, 8, norm))


def test_c_refuses_more_choices_than_experts(implementation):
    if implementation == "numpy":
        pytest.skip("the C binding's checks")
    x, gate, bias = case(2, 8, 31)
    with pytest.raises(ValueError, match="9 of 8 experts"):
        route(x, gate, bias, 9, 1, 1, True, 1.0)
    with pytest.raises(ValueError, match="cannot be split into 3 groups"):
        route(x, gate, bias, 2, 3, 1, True, 1.0)
