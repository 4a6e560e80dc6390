"""Softmax attention over cached positions: absorbed latent attention, and attention with explicit keys and values."""

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.activation import exp
from glm_gpu.kernels.lanes import dot_rows, lane_sum, widen


def attend_latent(q, cache, value_width, rows, counts, scale):
    """Attention in latent space: every head scores the same cached rows, whose first columns are also the values.

    Score of row j is dot(q, cache[j]) * scale; e_j = exp(score_j - max); the result is the sum of e_j * value_j in
    order of j, divided by the `lane_sum` of e_j.

    Args:
        q: [T, H, W] f32, absorbed query and rotated rope query.
        cache: [S, W] f32, or uint16 holding bfloat16, C-contiguous: latent, then rope key.
        value_width: R, columns of a row that are values.
        rows: [T, Kmax] int32, chosen positions ascending, or None for positions 0 .. counts[t]-1.
        counts: [T] int32, how many of the rows (or positions) token t sees; at least 1.
        scale: multiplied into each score.

    Returns:
        [T, H, R] f32.
    """
    if cpu.active:
        out = np.empty((*q.shape[:2], value_width), dtype=np.float32)
        cpu.active.attend_latent(np.ascontiguousarray(q), cache, _int32(rows), _int32(counts), scale, out)
        return out
    return _attend(q, cache, cache[:, :value_width], rows, counts, scale)


def attend_latents(q, caches, stops, value_width, rows, counts, scale):
    """`attend_latent` of tokens that belong to several sequences, in one call: the same bits.

    Args:
        q, value_width, rows, counts, scale: as in attend_latent.
        caches: each sequence's cache, all of one type.
        stops: [len(caches)] int32, ascending: tokens stops[i - 1] to stops[i] see cache i; the last is T.

    Returns:
        [T, H, R] f32.
    """
    out = np.empty((*q.shape[:2], value_width), dtype=np.float32)
    if cpu.active:
        arguments = np.ascontiguousarray(q), tuple(caches), _int32(stops), _int32(rows), _int32(counts), scale, out
        cpu.active.attend_latents(*arguments)
        return out
    first = 0
    for cache, stop in zip(caches, stops, strict=True):
        mine = slice(first, stop)
        chosen = None if rows is None else rows[mine]
        out[mine] = _attend(q[mine], cache, cache[:, :value_width], chosen, counts[mine], scale)
        first = stop
    return out


def attend_explicit(q, keys, values, rows, counts, scale):
    """Attention with a key and a value for every position; key heads are repeated for consecutive query heads.

    Args:
        q: [T, H, dq] f32.
        keys: [S, KV, dq] f32, or uint16 holding bfloat16, C-contiguous; KV divides H.
        values: [S, KV, dv] like keys.
        rows, counts, scale: as in attend_latent.

    Returns:
        [T, H, dv] f32.
    """
    out = np.empty((*q.shape[:2], values.shape[2]), dtype=np.float32)
    if cpu.active:
        cpu.active.attend_explicit(np.ascontiguousarray(q), keys, values, _int32(rows), _int32(counts), scale, out)
        return out
    num_kv_heads = keys.shape[1]
    share = q.shape[1] // num_kv_heads
    assert share * num_kv_heads == q.shape[1], (q.shape, keys.shape)
    for head in range(num_kv_heads):
        mine = slice(head * share, (head + 1) * share)
        out[:, mine] = _attend(q[:, mine], keys[:, head], values[:, head], rows, counts, scale)
    return out


def _int32(a):
    return None if a is None else np.ascontiguousarray(a, dtype=np.int32)


def _attend(q, keys, values, rows, counts, scale):
    counts = np.asarray(counts)
    assert counts.shape == q.shape[:1] and (counts.size == 0 or counts.min() >= 1), counts
    if rows is None:
        return _attend_prefix(q, widen(keys), widen(values), counts, scale)
    out = np.empty((*q.shape[:2], values.shape[1]), dtype=np.float32)
    for t, count in enumerate(counts):
        chosen = rows[t, :count]
        out[t : t + 1] = _attend_prefix(
            q[t : t + 1], widen(keys[chosen]), widen(values[chosen]), counts[t : t + 1], scale
        )
    return out


def _attend_prefix(q, keys, values, counts, scale):
    num_tokens, num_heads, width = q.shape
    # Tokens by ascending count, so that those which see position j are always a suffix.
    order = np.argsort(counts, kind="stable")
    counts = counts[order]
    num_seen = int(counts[-1]) if num_tokens else 0
    scores = dot_rows(q[order].reshape(-1, width), keys[:num_seen]) * np.float32(scale)
    scores = scores.reshape(num_tokens, num_heads, num_seen)
    seen = np.arange(num_seen) < counts[:, None]
    scores = np.where(seen[:, None], scores, np.float32(-np.inf))
    weights = exp(scores - scores.max(axis=-1, keepdims=True)) if num_tokens else scores
    acc = np.zeros((num_tokens, num_heads, values.shape[1]), dtype=np.float32)
    firsts = np.searchsorted(counts, np.arange(num_seen), side="right")
    for j, first in enumerate(firsts):
        acc[first:] += weights[first:, :, j, None] * values[j]
    out = np.empty_like(acc)
    out[order] = acc / lane_sum(weights)[..., None]
    return out
