"""Which experts a token goes to, and with what weight; f32 from the logits to the choice, ties to the lowest id."""

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.activation import exp, sigmoid
from glm_gpu.kernels.lanes import dot_rows, lane_sum


def route(x, gate, bias, experts_per_tok, n_group, topk_group, norm_topk_prob, scale):
    """Choose each token's experts: the bias steers the choice, the plain sigmoid is the weight.

    Args:
        x: [T, D] f32, normed hidden states.
        gate: [E, D] f32, router weight.
        bias: [E] f32, e_score_correction_bias, added for the choice only.
        experts_per_tok: K.
        n_group: groups of consecutive experts; 1 for no grouping.
        topk_group: groups kept, by the sum of their two largest biased scores; the others cannot be chosen.
        norm_topk_prob: divide the chosen weights by their sum + 1e-20.
        scale: routed_scaling_factor, multiplied in last.

    Returns:
        ids: [T, K] int32, best first.
        weights: [T, K] f32.

    Source: DeepSeek-V3 report, auxiliary-loss-free routing; `topk_method: noaux_tc`.
    """
    if cpu.active:
        return _on_cpu(x, gate, bias, experts_per_tok, n_group, topk_group, norm_topk_prob, scale)
    scores = sigmoid(dot_rows(x, gate))
    choice = scores + bias
    if n_group > 1:
        choice = _refuse_groups(choice, n_group, topk_group)
    ids = _best(choice, experts_per_tok)
    weights = np.take_along_axis(scores, ids, axis=1)
    if norm_topk_prob:
        weights = weights / (_sum_in_order(weights) + np.float32(1e-20))[:, None]
    return ids.astype(np.int32), weights * np.float32(scale)


def route_softmax(x, gate, experts_per_tok, norm_topk_prob):
    """Choose each token's experts by softmax over all of them, as OLMoE does.

    Args:
        x: [T, D] f32, normed hidden states.
        gate: [E, D] f32, router weight.
        experts_per_tok: K.
        norm_topk_prob: divide the chosen weights by their sum.

    Returns:
        ids: [T, K] int32, best first.
        weights: [T, K] f32.
    """
    if cpu.active:
        return _on_cpu(x, gate, None, experts_per_tok, 1, 1, norm_topk_prob, 1.0)
    logits = dot_rows(x, gate)
    exponentials = exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / lane_sum(exponentials)[:, None]
    ids = _best(probabilities, experts_per_tok)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if norm_topk_prob:
        weights = weights / _sum_in_order(weights)[:, None]
    return ids.astype(np.int32), weights


def _on_cpu(x, gate, bias, experts_per_tok, n_group, topk_group, norm_topk_prob, scale):
    ids = np.empty((x.shape[0], experts_per_tok), dtype=np.int32)
    weights = np.empty(ids.shape, dtype=np.float32)
    cpu.active.route(np.ascontiguousarray(x), gate, bias, n_group, topk_group, int(norm_topk_prob), scale, ids, weights)
    return ids, weights


def _best(choice, count):
    return np.argsort(-choice, axis=1, kind="stable")[:, :count]


def _refuse_groups(choice, n_group, topk_group):
    num_tokens, num_experts = choice.shape
    grouped = choice.reshape(num_tokens, n_group, num_experts // n_group)
    largest = np.sort(grouped, axis=2)
    kept = _best(largest[..., -1] + largest[..., -2], topk_group)
    refused = np.full(grouped.shape, -np.inf, dtype=np.float32)
    np.put_along_axis(refused, kept[..., None], np.take_along_axis(grouped, kept[..., None], axis=1), axis=1)
    return refused.reshape(num_tokens, num_experts)


def _sum_in_order(weights):
    total = np.zeros(weights.shape[0], dtype=np.float32)
    for column in weights.T:
        total = total + column
    return total
