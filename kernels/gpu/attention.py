"""Softmax attention over cached rows on a device: latent attention, and attention with key and value heads.

The positions of a row are cut into chunks of CHUNK, a chunk is a program of its own, and chunks are merged in order.
How many there are depends on the row's own count alone.
"""

import numpy as np

from glm_gpu.kernels.gpu.arrays import Array, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two
from glm_gpu.kernels.gpu.product import tiles

_ATTEND = Kernel("attention", "attend_kernel", num_warps=8, num_stages=2)
_MERGE = Kernel("attention", "merge_kernel")

CHUNK = 256
BLOCK_HEADS = 16


def parts_shape(num_rows: int, num_heads: int, max_count: int, value_width: int) -> tuple[int, int, int, int]:
    """Shape of the workspace `parts`: each chunk's maximum and sum, then its values.

    Args:
        num_rows: rows of a pass; with fewer the pass is attended in slices of so many rows, to the same bits.
        max_count: the largest number of positions that a row attends to.
        value_width: R of latent attention, the width of a value head otherwise.
    """
    return num_rows, num_heads, tiles(max_count, CHUNK), value_width + 2


def attend_latent(
    launcher: Launcher,
    q: Array,
    caches: Array,
    offset: int,
    cache_dtype: str,
    rows: Array | None,
    counts: Array,
    scale: float,
    parts: Array,
    out: Array,
) -> None:
    """Attention in latent space: all heads score the same cached rows, whose first R columns are also the values.

    Specification: glm_gpu.kernels.attention.attend_latent.

    Args:
        q: [T, H, R + P] 16-bit, absorbed query and rotated rope query.
        caches: [T] i64, address of each row's cache, a multiple of 16.
        offset: bytes, a multiple of 16, from there to this layer's stream of [S, R + P] rows.
        cache_dtype: "bf16" or "f16", as q.
        rows: [T, Kmax] i32, chosen positions ascending, or None for positions 0 .. counts[t]-1.
        counts: [T] i32, how many of the rows (or positions) row t sees; at least 1 and at most the `max_count` that
            `parts` was made for.
        scale: multiplied into each score.
        parts: f32 of parts_shape(T, H, max_count, R), a workspace.
        out: [T, H, R] 16-bit, quarter-split within each head; R is a multiple of 4.
    """
    value_width = out.shape[2]
    _attend(launcher, q, caches, offset, offset, 1, value_width, cache_dtype, rows, counts, scale, parts, out, True)


def attend_heads(
    launcher: Launcher,
    q: Array,
    caches: Array,
    key_offset: int,
    value_offset: int,
    num_kv_heads: int,
    cache_dtype: str,
    counts: Array,
    scale: float,
    parts: Array,
    out: Array,
) -> None:
    """Attention with key and value heads over all of a row's positions: OLMoE.

    Specification: glm_gpu.kernels.attention.attend_explicit.

    Args:
        q: [T, H, d] 16-bit, rotated.
        caches: [T] i64, address of each row's cache, a multiple of 16.
        key_offset, value_offset: bytes, a multiple of 16, from there to this layer's streams of [S, KV * d] rows.
        num_kv_heads: KV, divides H.
        cache_dtype, counts, scale: as in attend_latent.
        parts: f32 of parts_shape(T, H, max_count, d).
        out: [T, H, d] 16-bit, quarter-split over all heads together.
    """
    _attend(
        launcher,
        q,
        caches,
        key_offset,
        value_offset,
        num_kv_heads,
        q.shape[2],
        cache_dtype,
        None,
        counts,
        scale,
        parts,
        out,
        False,
    )


def _attend(
    launcher,
    q,
    caches,
    key_offset,
    value_offset,
    num_kv_heads,
    value_width,
    cache_dtype,
    rows,
    counts,
    scale,
    parts,
    out,
    is_latent,
):
    num_rows, num_heads, width = q.shape
    slice_rows, _, num_chunks, _ = parts.shape
    share = num_heads // num_kv_heads
    assert share * num_kv_heads == num_heads, (q.shape, num_kv_heads)
    assert parts.shape == (slice_rows, num_heads, num_chunks, value_width + 2), (parts.shape, q.shape, value_width)
    assert out.shape == (num_rows, num_heads, value_width), (out.shape, q.shape)
    assert key_offset % 16 == value_offset % 16 == 0, (key_offset, value_offset)
    rest = width - value_width if is_latent else 0
    inputs = {
        "q_ptr": q,
        "caches_ptr": caches,
        "rows_ptr": rows,
        "counts_ptr": counts,
        "parts_ptr": parts,
        "key_offset": np.int64(key_offset),
        "value_offset": np.int64(value_offset),
        "scale": float(scale),
        "max_rows": 0 if rows is None else rows.shape[1],
        "num_chunks": num_chunks,
    }
    merged = {"parts_ptr": parts, "counts_ptr": counts, "out_ptr": out, "num_chunks": num_chunks}
    common = {"NUM_HEADS": num_heads, "VALUE": value_width, "CHUNK": CHUNK, "IS_LATENT": is_latent}
    constants = common | {
        "SHARE": share,
        "WIDTH": width,
        "REST": rest,
        "CACHE_WIDTH": width * num_kv_heads,
        "BLOCK_VALUE": max(16, power_of_two(value_width)),
        "BLOCK_REST": max(16, power_of_two(rest)),
        "BLOCK_H": BLOCK_HEADS,
        "BLOCK_S": 32,
        "IS_SPARSE": rows is not None,
        "CACHE": cache_dtype,
    }
    head_tiles = num_kv_heads * tiles(share, BLOCK_HEADS)
    for first in range(0, num_rows, slice_rows):
        count = min(slice_rows, num_rows - first)
        launcher.launch(_ATTEND, (num_chunks, head_tiles, count), inputs | {"first_row": first}, constants)
        launcher.launch(
            _MERGE,
            (num_heads, count),
            merged | {"first_row": first},
            common | {"BLOCK_VALUE": power_of_two(value_width)},
        )
