"""The lightning indexer: scores of every cached position for a query, and the choice of the best ones."""

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.lanes import dot_rows, widen


def index_scores(q, head_weights, keys, counts, scale):
    """How much token t wants position s: sum over heads of weight * relu(dot(q, key) * scale).

    Args:
        q: [T, J, M] f32, rotated index queries.
        head_weights: [T, J] f32, signed.
        keys: [S, M] f32, or uint16 holding bfloat16, C-contiguous.
        counts: [T] int32, positions token t sees: 0 .. counts[t]-1.
        scale: multiplied into each dot product before the ReLU.

    Returns:
        [T, S] f32; -inf from counts[t] on. Heads are added in order.
    """
    num_tokens, num_heads, width = q.shape
    num_positions = keys.shape[0]
    if cpu.active:
        scores = np.empty((num_tokens, num_positions), dtype=np.float32)
        cpu.active.index_scores(
            np.ascontiguousarray(q), np.ascontiguousarray(head_weights), keys, _int32(counts), scale, scores
        )
        return scores
    dots = dot_rows(q.reshape(-1, width), widen(keys)) * np.float32(scale)
    dots = np.maximum(dots, np.float32(0)).reshape(num_tokens, num_heads, num_positions)
    scores = np.zeros((num_tokens, num_positions), dtype=np.float32)
    for head in range(num_heads):
        scores += head_weights[:, head, None] * dots[:, head]
    seen = np.arange(num_positions) < np.asarray(counts)[:, None]
    return np.where(seen, scores, np.float32(-np.inf))


def select_top(scores, counts, top_k):
    """The positions with the largest scores among the first counts[t]; of equal scores the lowest positions.

    Args:
        scores: [T, S] f32 without NaN.
        counts: [T] int32.
        top_k: index_topk.

    Returns:
        rows: [T, min(top_k, S)] int32, ascending, then -1.
        num: [T] int32, min(top_k, counts[t]).
    """
    num_tokens, num_positions = scores.shape
    if cpu.active:
        rows = np.empty((num_tokens, min(top_k, num_positions)), dtype=np.int32)
        num = np.empty(num_tokens, dtype=np.int32)
        cpu.active.select_top(np.ascontiguousarray(scores), _int32(counts), rows, num)
        return rows, num
    rows = np.full((num_tokens, min(top_k, num_positions)), -1, dtype=np.int32)
    num = np.minimum(np.asarray(counts), rows.shape[1]).astype(np.int32)
    for t in range(num_tokens):
        best = np.argsort(-scores[t, : counts[t]], kind="stable")[: num[t]]
        rows[t, : num[t]] = np.sort(best)
    return rows, num


def _int32(counts):
    return np.ascontiguousarray(counts, dtype=np.int32)
