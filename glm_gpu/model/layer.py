"""One decoder layer: attention, then an MLP or a mixture of experts, each on the normed residual stream."""

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.experts import mlp
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.model.attention import Rope, head_attention, latent_attention
from glm_gpu.model.indexer import Selection
from glm_gpu.model.moe import guess_experts, moe
from glm_gpu.model.numerics import Numerics, Probe
from glm_gpu.model.weights import HeadAttentionWeights, LayerWeights, MlpWeights, MoeWeights
from glm_gpu.tiers.store import ExpertStore


def decoder_layer(
    x: np.ndarray,
    weights: LayerWeights,
    config: ModelConfig,
    store: ExpertStore,
    batch: Batch,
    layer: int,
    cache_layer: int,
    rope: Rope,
    selections: list[Selection] | None,
    numerics: Numerics,
    probe: Probe | None = None,
    upcoming: tuple[int, LayerWeights] | None = None,
) -> tuple[np.ndarray, list[Selection] | None]:
    """The residual stream after this layer, and the selections its attention used.

    Args:
        x: [T, D] f32; left unchanged.
        layer: the layer's number in the checkpoint, which its experts are stored under.
        cache_layer: its place in the batch's caches.
        selections: an earlier layer's, one a span; None where this layer chooses for itself.
        upcoming: the next layer, with its number, whose experts may be guessed and read ahead.
    """
    h = rms_norm(x, weights.input_norm, config.rms_norm_eps)
    if isinstance(weights.attention, HeadAttentionWeights):
        x = x + head_attention(h, weights.attention, config, batch, cache_layer, rope, numerics)
    else:
        attended, selections = latent_attention(
            h, weights.attention, config, batch, cache_layer, rope, selections, numerics
        )
        x = x + attended
    if probe is not None:
        probe("attended", layer, x)
        for selection in selections or ():
            probe("selection", layer, selection.positions())
    if upcoming is not None and isinstance(upcoming[1].mlp, MoeWeights) and store.wants_prefetch(upcoming[0], len(x)):
        following, next_weights = upcoming
        guess = guess_experts(x, next_weights.post_attention_norm, next_weights.mlp, config)
        store.prefetch(following, guess)
    h = rms_norm(x, weights.post_attention_norm, config.rms_norm_eps)
    if isinstance(weights.mlp, MlpWeights):
        x = x + mlp(h, weights.mlp.gate, weights.mlp.up, weights.mlp.down, numerics.activations)
    else:
        x = x + moe(h, weights.mlp, config, store, layer, batch, numerics, probe)
    if probe is not None:
        probe("hidden", layer, x)
    return x, selections
