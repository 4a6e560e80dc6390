"""The lightning indexer on a device: scores of every cached position, and the exact choice of the best ones."""

import numpy as np

from glm_gpu.kernels.gpu.arrays import Array, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two
from glm_gpu.kernels.gpu.product import tiles

_SCORES = Kernel("indexer", "index_scores_kernel")
_SELECT = Kernel("indexer", "select_top_kernel", num_warps=8)

BLOCK_S = 64


def index_scores(
    launcher: Launcher,
    q: Array,
    head_weights: Array,
    caches: Array,
    offset: int,
    cache_dtype: str,
    counts: Array,
    scale: float,
    weight_scale: float,
    scores: Array,
) -> None:
    """How much token t wants position s: sum over heads of weight * relu(dot(q, key) * scale).

    Specification: glm_gpu.kernels.indexer.index_scores.

    Args:
        q: [T, J, M] 16-bit, rotated index queries.
        head_weights: [T, J] f32, signed.
        caches: [T] i64, address of each row's cache, a multiple of 16.
        offset: bytes, a multiple of 16, from there to this layer's stream of [S, M] index keys.
        cache_dtype: "bf16" or "f16", as q.
        counts: [T] i32, positions row t sees.
        scale: multiplied into each dot product before the ReLU.
        weight_scale: multiplied into each head weight.
        scores: [T, S] f32; entries at and after counts[t] are not written.
    """
    num_rows, num_heads, width = q.shape
    max_count = scores.shape[1]
    assert offset % 16 == 0, offset
    arguments = {
        "q_ptr": q,
        "weights_ptr": head_weights,
        "caches_ptr": caches,
        "counts_ptr": counts,
        "scores_ptr": scores,
        "offset": np.int64(offset),
        "scale": float(scale),
        "weight_scale": float(weight_scale),
        "max_count": max_count,
    }
    constants = {
        "NUM_HEADS": num_heads,
        "WIDTH": width,
        "BLOCK_J": max(16, power_of_two(num_heads)),
        "BLOCK_WIDTH": max(16, power_of_two(width)),
        "BLOCK_S": BLOCK_S,
        "CACHE": cache_dtype,
    }
    launcher.launch(_SCORES, (tiles(max_count, BLOCK_S), num_rows), arguments, constants)


def select_top(launcher: Launcher, scores: Array, counts: Array, rows: Array, num: Array) -> None:
    """The positions with the largest scores among the first counts[t]; of equal scores the lowest positions.

    Specification: glm_gpu.kernels.indexer.select_top, exactly.

    Args:
        scores: [T, S] f32 without NaN.
        counts: [T] i32, at most S.
        rows: [T, index_topk] i32, ascending, then -1.
        num: [T] i32, min(index_topk, counts[t]).
    """
    num_rows, max_count = scores.shape
    top_k = rows.shape[1]
    arguments = {
        "scores_ptr": scores,
        "counts_ptr": counts,
        "rows_ptr": rows,
        "num_ptr": num,
        "max_count": max_count,
    }
    constants = {"TOP_K": top_k, "BLOCK": 1024}
    launcher.launch(_SELECT, (num_rows,), arguments, constants)
