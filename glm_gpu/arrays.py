"""What several modules need of plain arrays."""

import numpy as np

CACHE_LINE = 64


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading items two arrays share."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def distinct(ids: np.ndarray, num_first: int, limit: int) -> tuple[np.ndarray, int]:
    """The different ids of rows, those in the first rows before those that only others have; how many the former are.

    Not by np.unique, which takes four times as long for the experts of a few rows.

    Args:
        ids: [T, K] int, from 0 up to, not including, `limit`.
        num_first: how many rows are the first.

    Returns:
        [U] int64, each of the two parts ascending; and the length of the first.
    """
    is_there = np.zeros(limit, bool)
    is_there[ids[:num_first]] = True
    first = np.flatnonzero(is_there)
    if num_first == len(ids):
        return first, len(first)
    is_there[ids[num_first:]] = True
    is_there[first] = False
    return np.concatenate([first, np.flatnonzero(is_there)]), len(first)


def line_aligned(num_bytes: int) -> np.ndarray:
    """Memory for weights: [num_bytes] uint8, uninitialized, from the beginning of a cache line on.

    Kernels read 64 bytes at a time. NumPy's own arrays begin 16 bytes off, and each of these reads touches two lines:
    [2048, 6144] int4 came at 73 % of the memory's bandwidth on one thread, 90 % when aligned.
    """
    memory = np.empty(num_bytes + CACHE_LINE - 1, np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    return memory[begin : begin + num_bytes]
