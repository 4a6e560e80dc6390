"""Absorbed latent attention: queries carried into latent space, attended latents carried out, one head at a time.

`kv_b` [H * (N + A), R] holds for each head N key rows, then A value rows. Packed forms are used as they are stored.
"""

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.attention import attend_latent
from glm_gpu.kernels.lanes import widen
from glm_gpu.kernels.matmul import ACTIVATIONS, matmul
from glm_gpu.quant import QuantizedMatrix, unpack

# Up to so many rows one call does all three steps: between calls Python finds its own code evicted from the caches.
# With more rows that no longer counts, and scratch memory that no plan knows of would.
_ROWS_AT_ONCE = 8


def attend_absorbed(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    kv_b: QuantizedMatrix,
    cache: np.ndarray,
    rows: np.ndarray | None,
    counts: np.ndarray,
    scale: np.float32,
    activations: str = "int16",
) -> np.ndarray:
    """`absorb_query`, `attend_latent` over the absorbed query beside the rotated one, `expand_value`: the same bits.

    Args:
        q_nope, q_rope: [T, H, N] and [T, H, P] f32, the two parts of the query, the second rotated.
        kv_b: [H * (N + A), R].
        cache: [S, R + P] f32, or uint16 holding bfloat16.
        rows, counts, scale: as in attend_latent.
        activations: as in expand_value.

    Returns:
        [T, H, A] f32.
    """
    num_rows, num_heads, nope_dim = q_nope.shape
    value_dim = kv_b.shape[0] // num_heads - nope_dim
    if cpu.active and num_rows <= _ROWS_AT_ONCE:
        out = np.empty((num_rows, num_heads, value_dim), np.float32)
        rows = None if rows is None else np.ascontiguousarray(rows, np.int32)
        counts = np.ascontiguousarray(counts, np.int32)
        arguments = cache, rows, counts, scale, ACTIVATIONS.index(activations), out
        cpu.active.attend_absorbed(np.ascontiguousarray(q_nope), q_rope, *kv_b.arguments, *arguments)
        return out
    queries = np.concatenate([absorb_query(q_nope, kv_b, value_dim), q_rope], axis=2)  # [T, H, R + P]
    mixed = attend_latent(queries, cache, kv_b.shape[1], rows, counts, scale)
    return expand_value(mixed, kv_b, nope_dim, activations)


def absorb_query(q: np.ndarray, kv_b: QuantizedMatrix, value_dim: int) -> np.ndarray:
    """Queries in latent space: the sum over d of q[t, h, d] * key row d of head h.

    In order of d, each operation rounded to f32: packed  acc = acc + (q[d] * s[d, r's group]) * int[d, r],
    plain  acc = acc + q[d] * w[d, r].

    Args:
        q: [T, H, N] f32, the part of the query without rope.
        kv_b: [H * (N + A), R].
        value_dim: A.

    Returns:
        [T, H, R] f32.
    """
    num_rows, num_heads, nope_dim = q.shape
    width = kv_b.shape[1]
    assert q.dtype == np.float32 and kv_b.shape[0] == num_heads * (nope_dim + value_dim), (q.shape, kv_b.shape)
    if cpu.active:
        out = np.empty((num_rows, num_heads, width), np.float32)
        cpu.active.absorb_query(np.ascontiguousarray(q), *kv_b.arguments, value_dim, out)
        return out
    if kv_b.format.is_packed:
        weights = unpack(kv_b).astype(np.float32)
        scales = np.repeat(kv_b.scales.astype(np.float32), kv_b.format.group or width, axis=1)[:, :width]
        scales = scales.reshape(num_heads, -1, width)
    else:
        weights = widen(kv_b.data)
        scales = None
    weights = weights.reshape(num_heads, -1, width)
    acc = np.zeros((num_rows, num_heads, width), np.float32)
    for d in range(nope_dim):
        factor = q[:, :, d, None] if scales is None else q[:, :, d, None] * scales[:, d]
        acc += factor * weights[:, d]
    return acc


def expand_value(o: np.ndarray, kv_b: QuantizedMatrix, nope_dim: int, activations: str = "int16") -> np.ndarray:
    """Attended latents as value vectors: for each head `matmul` with that head's value rows.

    Args:
        o: [T, H, R] f32.
        kv_b: [H * (N + A), R].
        nope_dim: N.
        activations: as in matmul.

    Returns:
        [T, H, A] f32.
    """
    num_rows, num_heads, width = o.shape
    rows_per_head = kv_b.shape[0] // num_heads
    assert kv_b.shape == (num_heads * rows_per_head, width), (o.shape, kv_b.shape)
    assert o.dtype == np.float32 and rows_per_head >= nope_dim, (o.dtype, rows_per_head, nope_dim)
    out = np.empty((num_rows, num_heads, rows_per_head - nope_dim), np.float32)
    if cpu.active:
        arguments = *kv_b.arguments, nope_dim, ACTIVATIONS.index(activations), out
        cpu.active.expand_value(np.ascontiguousarray(o), *arguments)
        return out
    for head in range(num_heads):
        values = kv_b.rows(head * rows_per_head + nope_dim, (head + 1) * rows_per_head)
        out[:, head] = matmul(np.ascontiguousarray(o[:, head]), values, activations)
    return out
