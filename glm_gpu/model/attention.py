"""Attention: GLM's latent form over a compressed cache, and OLMoE's plain heads."""

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.absorb import absorb_query, attend_absorbed, expand_value
from glm_gpu.kernels.attention import attend_explicit, attend_latents
from glm_gpu.kernels.matmul import matmul, matmuls
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.kernels.rope import rope_half, rope_interleaved
from glm_gpu.model.indexer import Selection, dense_selections, joined, select, store_rows
from glm_gpu.model.numerics import LATENT_NORM_EPS, Numerics
from glm_gpu.model.weights import HeadAttentionWeights, LatentAttentionWeights
from glm_gpu.quant import QuantizedMatrix, bf16_to_f32

Rope = tuple[np.ndarray, np.ndarray]


def latent_attention(
    h: np.ndarray,
    weights: LatentAttentionWeights,
    config: ModelConfig,
    batch: Batch,
    layer: int,
    rope: Rope,
    selections: list[Selection] | None,
    numerics: Numerics,
) -> tuple[np.ndarray, list[Selection]]:
    """Attention's contribution to the residual stream, and the selections it used.

    Queries are absorbed into the latent space, so keys and values are never expanded: q_abs = Wk^T q_nope,
    score = q_abs . latent + q_rope . rope_key, output = Wv (sum of p * latent).

    Args:
        h: [T, D] f32, the layer's normed input.
        layer: the layer's place in the cache; its rows for this pass are written here.
        rope: cos and sin, [T, P / 2] each.
        selections: one a span, made by an earlier layer; None where this layer's own indexer chooses.

    Returns:
        [T, D] f32, and one selection a span.

    Source: DeepSeek-V2 report, multi-head latent attention; `glm_moe_dsa`.
    """
    num_heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    rank, activations = config.kv_lora_rank, numerics.activations
    cos, sin = rope
    of_h = [weights.q_a, weights.kv_a]
    if selections is None:
        assert weights.indexer is not None
        of_h.append(weights.indexer.key)
    q_latent, kv, *index_keys = matmuls(h, of_h, activations)
    q_latent = rms_norm(q_latent, weights.q_a_norm, LATENT_NORM_EPS)
    q = matmul(q_latent, weights.q_b, activations).reshape(len(h), num_heads, -1)  # [T, H, N + P]
    q_nope, q_rope = q[..., :nope], rope_interleaved(q[..., nope:], cos, sin)
    latent = rms_norm(kv[:, :rank], weights.kv_a_norm, LATENT_NORM_EPS)
    new_rows = np.concatenate([latent, rope_interleaved(kv[:, rank:], cos, sin)], axis=1)  # [T, R + P]
    store_rows(batch, layer, "latent", new_rows)

    if selections is None:
        selections = select(h, q_latent, *index_keys, weights.indexer, config, batch, layer, rope, numerics)

    scale = np.float32((nope + config.qk_rope_head_dim) ** -0.5)
    if numerics.explicit_prefill and batch.phase == "prefill":
        heads = _attend_expanded(q_nope, q_rope, weights.kv_b, config, batch, layer, selections, scale, activations)
    else:
        heads = _attend_absorbed(q_nope, q_rope, weights.kv_b, batch, layer, selections, scale, activations)
    return matmul(heads.reshape(len(h), -1), weights.output, activations), selections


def _attend_absorbed(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    kv_b: QuantizedMatrix,
    batch: Batch,
    layer: int,
    selections: list[Selection],
    scale: np.float32,
    activations: str,
) -> np.ndarray:
    """The absorbed form, with kv_b read once for all sequences. [T, H, A] f32."""
    caches = [span.cache.read(layer, "latent", span.cached_stop) for span in batch.spans]
    if len(caches) == 1:
        (chosen,) = selections
        return attend_absorbed(q_nope, q_rope, kv_b, caches[0], chosen.rows, chosen.counts, scale, activations)
    num_heads, nope = q_nope.shape[1:]
    absorbed = absorb_query(q_nope, kv_b, kv_b.shape[0] // num_heads - nope)
    queries = np.concatenate([absorbed, q_rope], axis=2)  # [T, H, R + P]
    chosen = joined(selections)
    mixed = attend_latents(queries, caches, batch.stops, kv_b.shape[1], chosen.rows, chosen.counts, scale)
    return expand_value(mixed, kv_b, nope, activations)


def _attend_expanded(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    kv_b: QuantizedMatrix,
    config: ModelConfig,
    batch: Batch,
    layer: int,
    selections: list[Selection],
    scale: np.float32,
    activations: str,
) -> np.ndarray:
    """The explicit form: keys and values of every cached position are expanded from its latent. [T, H, A] f32."""
    num_heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    queries = np.concatenate([q_nope, q_rope], axis=2)
    heads = np.empty((len(q_nope), num_heads, config.v_head_dim), np.float32)
    for span, selection in zip(batch.spans, selections, strict=True):
        cached = span.cache.read(layer, "latent", span.cached_stop)
        cached = bf16_to_f32(cached) if span.cache.layout.is_bf16 else cached
        expanded = matmul(cached[:, :rank], kv_b, activations).reshape(len(cached), num_heads, -1)  # [S, H, N + A]
        rope_keys = np.broadcast_to(cached[:, None, rank:], (len(cached), num_heads, config.qk_rope_head_dim))
        keys = np.concatenate([expanded[..., :nope], rope_keys], axis=2)
        values = np.ascontiguousarray(expanded[..., nope:])
        heads[span.rows] = attend_explicit(queries[span.rows], keys, values, selection.rows, selection.counts, scale)
    return heads


def head_attention(
    h: np.ndarray,
    weights: HeadAttentionWeights,
    config: ModelConfig,
    batch: Batch,
    layer: int,
    rope: Rope,
    numerics: Numerics,
) -> np.ndarray:
    """OLMoE's attention: norms over whole projections, half-split rotation, every earlier position attended to.

    Args:
        h: [T, D] f32, the layer's normed input.
        rope: cos and sin, [T, head width / 2] each.

    Returns:
        [T, D] f32.

    Source: OLMoE report, section 2 (QK-Norm); `olmoe`.
    """
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    width, activations = config.head_dim, numerics.activations
    query = rms_norm(matmul(h, weights.query, activations), weights.query_norm, config.rms_norm_eps)
    key = rms_norm(matmul(h, weights.key, activations), weights.key_norm, config.rms_norm_eps)
    value = matmul(h, weights.value, activations)
    if config.clip_qkv is not None:
        query, key, value = (np.clip(a, -config.clip_qkv, config.clip_qkv) for a in (query, key, value))
    query = rope_half(query.reshape(len(h), num_heads, width), *rope)
    key = rope_half(key.reshape(len(h), num_kv_heads, width), *rope)
    store_rows(batch, layer, "key", key.reshape(len(h), -1))
    store_rows(batch, layer, "value", value)

    heads = np.empty((len(h), num_heads, width), np.float32)
    for span, selection in zip(batch.spans, dense_selections(batch), strict=True):
        stop = span.cached_stop
        keys = span.cache.read(layer, "key", stop).reshape(stop, num_kv_heads, width)
        values = span.cache.read(layer, "value", stop).reshape(stop, num_kv_heads, width)
        heads[span.rows] = attend_explicit(
            query[span.rows], keys, values, None, selection.counts, np.float32(width**-0.5)
        )
    return matmul(heads.reshape(len(h), -1), weights.output, activations)
