"""Softmax attention of one row over a chunk of its positions, and the merge of chunks."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.product import split_columns


@triton.jit
def typed(address, CACHE: tl.constexpr):
    """An address, a multiple of 16 bytes, as a pointer into a cache."""
    if CACHE == "bf16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)


@triton.jit
def attend_kernel(
    q_ptr,
    caches_ptr,
    rows_ptr,
    counts_ptr,
    parts_ptr,
    key_offset,
    value_offset,
    scale,
    max_rows,
    num_chunks,
    first_row,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    CACHE_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LATENT: tl.constexpr,
    IS_SPARSE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Up to BLOCK_H heads that share keys, over CHUNK positions: maximum, sum, and weighted values, undivided."""
    chunk = tl.program_id(0)
    place = tl.program_id(2).to(tl.int64)
    row = first_row + place
    count = tl.load(counts_ptr + row)
    begin = chunk * CHUNK
    if begin >= count:
        return
    HEAD_TILES: tl.constexpr = (SHARE + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // HEAD_TILES
    local = tl.program_id(1) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * SHARE + tl.minimum(local, SHARE - 1)
    value = tl.arange(0, BLOCK_VALUE)
    is_value = value < VALUE
    rest = tl.arange(0, BLOCK_REST)
    is_rest = rest < REST
    q_rows = q_ptr + (row * NUM_HEADS + head) * WIDTH
    q = tl.load(q_rows[:, None] + value[None, :], mask=is_value[None, :], other=0.0)
    if REST > 0:
        q_rest = tl.load(q_rows[:, None] + VALUE + rest[None, :], mask=is_rest[None, :], other=0.0)
    cache = tl.load(caches_ptr + row)
    keys = typed(cache + key_offset, CACHE) + kv_head * WIDTH
    values = typed(cache + value_offset, CACHE) + kv_head * WIDTH
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_VALUE), tl.float32)
    for step in tl.range(0, tl.cdiv(tl.minimum(count - begin, CHUNK), BLOCK_S)):
        j = begin + step * BLOCK_S + tl.arange(0, BLOCK_S)
        is_seen = j < count
        if IS_SPARSE:
            position = tl.load(rows_ptr + row * max_rows + j, mask=is_seen, other=0).to(tl.int64)
        else:
            position = j.to(tl.int64)
        at = position * CACHE_WIDTH
        mask = is_seen[:, None] & is_value[None, :]
        key = tl.load(keys + at[:, None] + value[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(key))
        if REST > 0:
            key_rest = tl.load(
                keys + at[:, None] + VALUE + rest[None, :], mask=is_seen[:, None] & is_rest[None, :], other=0.0
            )
            scores = tl.dot(q_rest, tl.trans(key_rest), scores)
        scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        shrink = tl.exp(maximum - larger)
        total = total * shrink + tl.sum(weights, 1)
        if IS_LATENT:
            attended = key
        else:
            attended = tl.load(values + at[:, None] + value[None, :], mask=mask, other=0.0)
        acc = tl.dot(weights.to(key.dtype), attended, acc * shrink[:, None])
        maximum = larger
    parts = parts_ptr + ((place * NUM_HEADS + head) * num_chunks + chunk) * (VALUE + 2)
    is_head = local < SHARE
    tl.store(parts, maximum, mask=is_head)
    tl.store(parts + 1, total, mask=is_head)
    tl.store(parts[:, None] + 2 + value[None, :], acc, mask=is_head[:, None] & is_value[None, :])


@triton.jit
def merge_kernel(
    parts_ptr,
    counts_ptr,
    out_ptr,
    num_chunks,
    first_row,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LATENT: tl.constexpr,
):
    """One head of one row: its chunks in order, divided by the sum."""
    head = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = first_row + place
    value = tl.arange(0, BLOCK_VALUE)
    is_value = value < VALUE
    parts = parts_ptr + (place * NUM_HEADS + head) * num_chunks * (VALUE + 2)
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_VALUE,), tl.float32)
    for _ in range(tl.cdiv(tl.load(counts_ptr + row), CHUNK)):
        part_maximum = tl.load(parts)
        larger = tl.maximum(maximum, part_maximum)
        shrink = tl.exp(maximum - larger)
        share = tl.exp(part_maximum - larger)
        total = total * shrink + tl.load(parts + 1) * share
        acc = acc * shrink + tl.load(parts + 2 + value, mask=is_value, other=0.0) * share
        maximum = larger
        parts += VALUE + 2
    if IS_LATENT:
        column = head * VALUE + split_columns(value, VALUE)
    else:
        column = split_columns(head * VALUE + value, NUM_HEADS * VALUE)
    out = out_ptr + row * (NUM_HEADS * VALUE) + column
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=is_value)
