"""Sparse layers: the router's choice, the chosen experts, the shared expert."""

import numpy as np

from glm_gpu.arrays import distinct
from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.experts import expert_ffn, mlp
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.kernels.router import route, route_softmax
from glm_gpu.model.numerics import Numerics, Probe
from glm_gpu.model.weights import MoeWeights
from glm_gpu.slab import SlabLayout
from glm_gpu.tiers.store import ExpertStore, Lease


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
    batch: Batch,
    numerics: Numerics,
    probe: Probe | None = None,
) -> np.ndarray:
    """A sparse layer's contribution to the residual stream: [T, D] f32.

    Every expert that any row chose runs once over the rows that chose it. The shared expert, and the chosen experts
    that are in memory, run while the others are read.
    """
    ids, expert_weights = choose_experts(h, weights, config)
    if probe is not None:
        probe("router_ids", layer, ids)
        probe("router_weights", layer, expert_weights)
    store.count(layer, ids, batch.num_decode)
    experts, choice, num_decode = _leased(ids, batch.num_decode, config.n_routed_experts)
    with store.lease(layer, experts, num_decode) as lease:
        shared = weights.shared
        if shared is not None:
            shared = mlp(h, shared.gate, shared.up, shared.down, numerics.activations)
        y = _routed(h, lease, len(experts), store.layout(layer), choice, expert_weights, numerics.activations)
    return y if shared is None else y + shared


def _leased(ids: np.ndarray, num_decode: int, num_experts: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The experts that any row chose, [U] int; where in them each choice is, [T, K] int32; how many answers chose."""
    if len(ids) == 1:  # a row's experts are distinct
        return ids[0], np.arange(ids.size, dtype=np.int32)[None], num_decode * ids.size
    experts, num_answers_chose = distinct(ids, num_decode, num_experts)
    place = np.empty(num_experts, np.int32)
    place[experts] = np.arange(len(experts))
    return experts, place[ids], num_answers_chose


def _routed(
    h: np.ndarray,
    lease: Lease,
    num_experts: int,
    layout: SlabLayout,
    choice: np.ndarray,
    weights: np.ndarray,
    activations: str,
) -> np.ndarray:
    """The chosen experts' weighted sum, [T, D] f32; the same bits in whichever parts the experts come."""
    results = None
    for members, slabs in lease.parts():
        if len(members) == num_experts:
            return expert_ffn(h, slabs, layout, choice, weights, activations)
        if results is None:
            results = np.empty((*choice.shape, h.shape[1]), np.float32)  # [T, K, D]
        place = np.full(num_experts, -1, np.int32)
        place[members] = np.arange(len(members))
        tokens, ranks = np.nonzero(place[choice] >= 0)
        alone = place[choice[tokens, ranks]][:, None]  # each (token, expert) pair as a row with one choice of weight 1
        results[tokens, ranks] = expert_ffn(
            h[tokens], slabs, layout, alone, np.ones_like(alone, np.float32), activations
        )
    assert results is not None
    results *= weights[:, :, None]
    y = results[:, 0].copy()
    for rank in range(1, results.shape[1]):
        y += results[:, rank]
    return y


def guess_experts(x: np.ndarray, norm: np.ndarray, weights: MoeWeights, config: ModelConfig) -> np.ndarray:
    """The distinct experts that a later layer will probably choose, were its router asked now: [U] int32.

    Args:
        x: [T, D] f32, the residual stream some layers before.
        norm: the later layer's post-attention norm.
    """
    ids, _ = choose_experts(rms_norm(x, norm, config.rms_norm_eps), weights, config)
    return np.unique(ids)
