"""Rotary position embedding: angles in f64, rotations in f32."""

import math

import numpy as np

from glm_gpu.kernels import cpu

_cos = np.frompyfunc(math.cos, 1, 1)
_sin = np.frompyfunc(math.sin, 1, 1)


def rope_tables(positions, theta, dim):
    """Cosine and sine of position * theta^(-2j/dim), once a pass for all layers.

    math.cos and not np.cos: NumPy may treat the body and the tail of an array differently, and a position's bits
    must not depend on the positions beside it.

    Args:
        positions: [T] integers.
        theta: rope_theta.
        dim: rope width P, even.

    Returns:
        cos, sin: [T, P/2] f32.
    """
    frequencies = np.array([math.pow(theta, -2.0 * j / dim) for j in range(dim // 2)], dtype=np.float64)
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies
    return _cos(angles).astype(np.float32), _sin(angles).astype(np.float32)


def rope_interleaved(x, cos, sin):
    """Rotate the pairs (x[2j], x[2j+1]) of the last axis; GLM's attention and indexer.

    Args:
        x: [T, ..., P] f32.
        cos, sin: [T, P/2] f32.

    Returns:
        [T, ..., P] f32, a new array, members of a pair still side by side.
    """
    if cpu.active:
        return _on_cpu(x, cos, sin, is_interleaved=True)
    cos, sin = _beside(x, cos), _beside(x, sin)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty(x.shape, dtype=np.float32)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = odd * cos + even * sin
    return out


def rope_half(x, cos, sin):
    """Rotate the pairs (x[j], x[j + P/2]) of the last axis; OLMoE.

    Args:
        x: [T, ..., P] f32.
        cos, sin: [T, P/2] f32.

    Returns:
        [T, ..., P] f32, a new array.
    """
    if cpu.active:
        return _on_cpu(x, cos, sin, is_interleaved=False)
    cos, sin = _beside(x, cos), _beside(x, sin)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, dtype=np.float32)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def _on_cpu(x, cos, sin, is_interleaved):
    vectors = np.ascontiguousarray(x)
    if x.ndim != 3:
        vectors = vectors.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    out = np.empty(vectors.shape, np.float32)
    cpu.active.rope(vectors, cos, sin, int(is_interleaved), out)
    return out if x.ndim == 3 else out.reshape(x.shape)


def _beside(x, table):
    return table.reshape(table.shape[0], *(1,) * (x.ndim - 2), table.shape[1])
