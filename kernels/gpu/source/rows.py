"""Rotary embedding, and new rows of the caches."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.attention import typed


@triton.jit
def cache_row(caches_ptr, positions_ptr, offset, row, WIDTH: tl.constexpr, CACHE: tl.constexpr):
    """Where a row of the pass is stored in its sequence's cache."""
    begin = tl.load(caches_ptr + row) + offset
    position = tl.load(positions_ptr + row).to(tl.int64)
    return typed(begin, CACHE) + position * WIDTH


@triton.jit
def append_latent_kernel(
    kv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    caches_ptr,
    positions_ptr,
    offset,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    CACHE: tl.constexpr,
):
    """One latent row: the norm of RANK columns, the rotation of 2 HALF."""
    WIDTH: tl.constexpr = RANK + 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    out = cache_row(caches_ptr, positions_ptr, offset, row, WIDTH, CACHE)
    column = tl.arange(0, BLOCK_RANK)
    is_column = column < RANK
    latent = tl.load(kv_ptr + row * WIDTH + column, mask=is_column, other=0.0)
    r = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent = latent * r * tl.load(weight_ptr + column, mask=is_column, other=0.0)
    tl.store(out + column, latent.to(out.dtype.element_ty), mask=is_column)
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    cos = tl.load(cos_ptr + row * HALF + pair, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + pair, mask=is_pair, other=0.0)
    even = tl.load(kv_ptr + row * WIDTH + RANK + 2 * pair, mask=is_pair, other=0.0)
    odd = tl.load(kv_ptr + row * WIDTH + RANK + 2 * pair + 1, mask=is_pair, other=0.0)
    tl.store(out + RANK + 2 * pair, (even * cos - odd * sin).to(out.dtype.element_ty), mask=is_pair)
    tl.store(out + RANK + 2 * pair + 1, (odd * cos + even * sin).to(out.dtype.element_ty), mask=is_pair)


@triton.jit
def partner_and_pair(column, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """For each column the other member of its pair, the pair's number, and the sign of the other member's term."""
    if IS_INTERLEAVED:
        is_first = column % 2 == 0
        partner = column + tl.where(is_first, 1, -1)
        pair = column // 2
    else:
        is_first = column < HALF
        partner = column + tl.where(is_first, HALF, -HALF)
        pair = tl.where(is_first, column, column - HALF)
    return partner, pair, tl.where(is_first, -1.0, 1.0)


@triton.jit
def append_index_key_kernel(
    keys_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    caches_ptr,
    positions_ptr,
    offset,
    eps,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    CACHE: tl.constexpr,
):
    """One index key: LayerNorm over WIDTH columns, rotation of the first 2 HALF."""
    row = tl.program_id(0).to(tl.int64)
    out = cache_row(caches_ptr, positions_ptr, offset, row, WIDTH, CACHE)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    is_rotated = column < 2 * HALF
    x = tl.load(keys_ptr + row * WIDTH + column, mask=is_column, other=0.0)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(is_column, x - mean, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0)
    y = centred * r * weight + tl.load(bias_ptr + column, mask=is_column, other=0.0)
    partner, pair, sign = partner_and_pair(column, HALF, IS_INTERLEAVED)
    # the other member of each pair is normed here again rather than moved between threads
    other = tl.load(keys_ptr + row * WIDTH + partner, mask=is_rotated, other=0.0)
    weight = tl.load(weight_ptr + partner, mask=is_rotated, other=0.0)
    other = (other - mean) * r * weight + tl.load(bias_ptr + partner, mask=is_rotated, other=0.0)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + row * HALF + pair, mask=is_rotated, other=0.0)
    y = tl.where(is_rotated, y * cos + sign * other * sin, y)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def append_kernel(
    rows_ptr,
    caches_ptr,
    positions_ptr,
    offset,
    clip,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    CACHE: tl.constexpr,
):
    """One row, rounded."""
    row = tl.program_id(0).to(tl.int64)
    out = cache_row(caches_ptr, positions_ptr, offset, row, WIDTH, CACHE)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    x = tl.load(rows_ptr + row * WIDTH + column, mask=is_column, other=0.0)
    if HAS_CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    tl.store(out + column, x.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    clip,
    NUM_HEADS: tl.constexpr,
    X_WIDTH: tl.constexpr,
    X_BEGIN: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_BEGIN: tl.constexpr,
    HALF: tl.constexpr,
    NUM_COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_CLIP: tl.constexpr,
):
    """One head of one row."""
    row = tl.program_id(0).to(tl.int64)
    vector = row * NUM_HEADS + tl.program_id(1)
    column = tl.arange(0, BLOCK)
    is_rotated = column < 2 * HALF
    is_column = column < 2 * HALF + NUM_COPIED
    partner, pair, sign = partner_and_pair(column, HALF, IS_INTERLEAVED)
    x_row = x_ptr + vector * X_WIDTH + X_BEGIN
    x = tl.load(x_row + column, mask=is_column, other=0.0)
    other = tl.load(x_row + partner, mask=is_rotated, other=0.0)
    if HAS_CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
        other = tl.minimum(tl.maximum(other, -clip), clip)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + row * HALF + pair, mask=is_rotated, other=0.0)
    y = tl.where(is_rotated, x * cos + sign * other * sin, x)
    tl.store(out_ptr + vector * OUT_WIDTH + OUT_BEGIN + column, y.to(out_ptr.dtype.element_ty), mask=is_column)
