"""Sums in one stated order, so that NumPy and every instruction set give the same bits for any number of rows.

A sum over k keeps 16 lanes (lane = k mod 16), which are folded by halves at the end: lane l takes l + 8, then
l + 4, l + 2, l + 1. Every multiplication and every addition is rounded on its own. Padding with zeros changes
nothing, because every sum starts from +0.
"""

import numpy as np

from glm_gpu.quant import bf16_to_f32

LANES = 16
GROUP = 64

# 16 lanes of 4096 f32 products are 256 KiB: they stay in the second-level cache between the multiply and the adds.
_TILE = 4096
_TILE_COLUMNS = 512


def widen(a):
    """The same values as f32: bfloat16 bit patterns (uint16) are widened, float32 comes back as it is."""
    if a.dtype == np.uint16:
        return bf16_to_f32(a)
    assert a.dtype == np.float32, a.dtype
    return a


def fold(lanes):
    """Sum of the 16 lanes on the first axis, by halves."""
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return lanes[0]


def lane_sum(a):
    """Sum over the last axis: 16 lanes in ascending order, folded by halves.

    Args:
        a: [..., n] f32 or f64.

    Returns:
        [...] of the same dtype.
    """
    n = a.shape[-1]
    padded = np.zeros((*a.shape[:-1], -(-n // LANES) * LANES), dtype=a.dtype)
    padded[..., :n] = a
    rows = padded.reshape(*a.shape[:-1], -1, LANES)
    # accumulate writes every partial sum, so its order is ascending by definition; add.reduce promises none.
    lanes = np.add.accumulate(rows, axis=-2)[..., -1, :] + a.dtype.type(0)
    return fold(np.moveaxis(lanes, -1, 0))


def dot(a, b, scales=None):
    """Sum over the first axis of a * b: groups of 64, added in order; inside a group 16 lanes of 4 products.

    Args:
        a, b: [I, ...] f32, broadcast against each other.
        scales: [ceil(I/64), ...] f32 multiplied into each group's sum, or None.

    Returns:
        f32 of the broadcast shape without the first axis.
    """
    width = a.shape[0]
    assert b.shape[0] == width, (a.shape, b.shape)
    total = np.float32(0)
    for group, start in enumerate(range(0, width, GROUP)):
        lanes = None
        for k in range(start, min(start + GROUP, width), LANES):
            product = a[k : k + LANES] * b[k : k + LANES]
            if lanes is None:
                lanes = product
                if len(product) < LANES:
                    lanes = np.zeros((LANES, *product.shape[1:]), dtype=np.float32)
                    lanes[: len(product)] = product
            else:
                lanes[: len(product)] += product
        partial = fold(lanes)
        total = total + (partial if scales is None else partial * scales[group])
    return total


def dot_rows(x, w, scales=None):
    """Products of every row of x with every row of w, each one a `dot`.

    Args:
        x: [T, I] f32.
        w: [O, I] f32.
        scales: [O, ceil(I/64)] f32, one for each group of w, or None.

    Returns:
        [T, O] f32.
    """
    num_rows, num_columns = x.shape[0], w.shape[0]
    out = np.empty((num_rows, num_columns), dtype=np.float32)
    columns = min(num_columns, _TILE_COLUMNS)
    rows = max(1, _TILE // max(1, columns))
    x_by_k = np.ascontiguousarray(x.T)[:, :, None]  # [I, T, 1]
    for left in range(0, num_columns, max(1, columns)):
        right = left + columns
        w_by_k = np.ascontiguousarray(w[left:right].T)[:, None, :]  # [I, 1, O]
        scales_by_group = None if scales is None else np.ascontiguousarray(scales[left:right].T)[:, None, :]
        for top in range(0, num_rows, rows):
            out[top : top + rows, left:right] = dot(x_by_k[:, top : top + rows], w_by_k, scales_by_group)
    return out
