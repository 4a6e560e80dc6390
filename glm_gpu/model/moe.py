"""Sparse layers: the router's choice, the chosen experts, the shared expert."""

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.experts import expert_ffn, mlp
from glm_gpu.kernels.router import route, route_softmax
from glm_gpu.model.numerics import Numerics, Probe
from glm_gpu.model.weights import MoeWeights
from glm_gpu.tiers.store import ExpertStore


def choose_experts(h: np.ndarray, weights: MoeWeights, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Each row's experts and their weights.

    Args:
        h: [T, D] f32, normed hidden states.

    Returns:
        ids: [T, K] int32, best first.
        weights: [T, K] f32.
    """
    if weights.bias is None:
        return route_softmax(h, weights.gate, config.num_experts_per_tok, config.norm_topk_prob)
    return route(
        h,
        weights.gate,
        weights.bias,
        config.num_experts_per_tok,
        config.n_group,
        config.topk_group,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )


def moe(
    h: np.ndarray,
    weights: MoeWeights,
    config: ModelConfig,
    store: ExpertStore,
    layer: int,
    phase: Phase,
    numerics: Numerics,
    probe: Probe | None = None,
) -> np.ndarray:
    """A sparse layer's contribution to the residual stream: [T, D] f32.

    Every expert that any row chose runs once over the rows that chose it.
    """
    ids, expert_weights = choose_experts(h, weights, config)
    if probe is not None:
        probe("router_ids", layer, ids)
        probe("router_weights", layer, expert_weights)
    distinct, choice = np.unique(ids, return_inverse=True)
    store.count(layer, ids, phase)
    choice = choice.reshape(ids.shape).astype(np.int32)
    with store.lease(layer, distinct) as slabs:
        y = expert_ffn(h, slabs, store.layout(layer), choice, expert_weights, numerics.activations)
    if weights.shared is not None:
        y += mlp(h, weights.shared.gate, weights.shared.up, weights.shared.down, numerics.activations)
    return y
