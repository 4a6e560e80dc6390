"""Scores of cached positions, and the exact choice of the best."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.attention import typed


@triton.jit
def index_scores_kernel(
    q_ptr,
    weights_ptr,
    caches_ptr,
    counts_ptr,
    scores_ptr,
    offset,
    scale,
    weight_scale,
    max_count,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CACHE: tl.constexpr,
):
    """BLOCK_S positions for one row."""
    row = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(counts_ptr + row), max_count)
    begin = tl.program_id(0) * BLOCK_S
    if begin >= count:
        return
    position = begin + tl.arange(0, BLOCK_S)
    is_seen = position < count
    head = tl.arange(0, BLOCK_J)
    is_head = head < NUM_HEADS
    column = tl.arange(0, BLOCK_WIDTH)
    is_column = column < WIDTH
    q = tl.load(
        q_ptr + row * (NUM_HEADS * WIDTH) + head[:, None] * WIDTH + column[None, :],
        mask=is_head[:, None] & is_column[None, :],
        other=0.0,
    )
    keys = typed(tl.load(caches_ptr + row) + offset, CACHE)
    key = tl.load(
        keys + position.to(tl.int64)[None, :] * WIDTH + column[:, None],
        mask=is_seen[None, :] & is_column[:, None],
        other=0.0,
    )
    dots = tl.maximum(tl.dot(q, key) * scale, 0.0)
    weights = tl.load(weights_ptr + row * NUM_HEADS + head, mask=is_head, other=0.0) * weight_scale
    scores = tl.sum(dots * weights[:, None], 0)
    tl.store(scores_ptr + row * max_count + position, scores, mask=is_seen)


@triton.jit
def ordered(scores):
    """Scores as unsigned integers in the same order; both zeros are one."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def select_top_kernel(scores_ptr, counts_ptr, rows_ptr, num_ptr, max_count, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One row: the k-th largest score digit by digit, then everything above it and the first that equal it."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts_ptr + row), max_count)
    num = tl.minimum(count, TOP_K)
    scores = scores_ptr + row * max_count
    rows = rows_ptr + row * TOP_K
    num_blocks = tl.cdiv(count, BLOCK)
    digit = tl.arange(0, 256)
    found = tl.full((1,), 0, tl.uint32)
    wanted = num
    for byte in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for block in range(num_blocks):
            position = block * BLOCK + tl.arange(0, BLOCK)
            keys = ordered(tl.load(scores + position, mask=position < count, other=0.0))
            is_open = position < count
            if byte > 0:
                is_open = is_open & (keys >> (32 - 8 * byte) == found >> (32 - 8 * byte))
            counts += tl.histogram(((keys >> (24 - 8 * byte)) & 255).to(tl.int32), 256, mask=is_open)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        best = tl.max(tl.where(at_least >= wanted, digit, 0), 0)
        wanted -= tl.sum(tl.where(digit > best, counts, 0), 0)
        found = found | (best.to(tl.uint32) << (24 - 8 * byte))
    taken = tl.full((1,), 0, tl.int32)
    ties = tl.full((1,), 0, tl.int32)
    for block in range(num_blocks):
        position = block * BLOCK + tl.arange(0, BLOCK)
        is_seen = position < count
        keys = ordered(tl.load(scores + position, mask=is_seen, other=0.0))
        is_tie = (is_seen & (keys == found)).to(tl.int32)
        is_chosen = (is_seen & (keys > found)) | ((is_tie == 1) & (ties + tl.cumsum(is_tie, 0) <= wanted))
        is_chosen = is_chosen.to(tl.int32)
        place = taken + tl.cumsum(is_chosen, 0) - 1
        tl.store(rows + place, position, mask=is_chosen == 1)
        taken += tl.sum(is_chosen, 0)
        ties += tl.sum(is_tie, 0)
    for block in range(tl.cdiv(TOP_K, BLOCK)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(rows + place, tl.full((BLOCK,), -1, tl.int32), mask=(place >= num) & (place < TOP_K))
    tl.store(num_ptr + row, num)
