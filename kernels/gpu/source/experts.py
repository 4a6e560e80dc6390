"""Gated feed-forward networks: routed experts by address, dense ones, and the weighted sum of experts."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.product import product, split_columns, weight_rows


@triton.jit
def silu_mul(gate, up):
    """gate / (1 + e^-gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def slab_rows(
    slab,
    matrix,
    DATA: tl.constexpr,
    NEXT_DATA: tl.constexpr,
    SCALES: tl.constexpr,
    NEXT_SCALES: tl.constexpr,
    w_row,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Pointers to the words and the scales of rows of matrix 0 or 1 of a slab, which lie so many bytes into it.

    Offsets are added to pointers: added to the address before, they would cost the compiler what it knows of alignment.
    """
    if BITS == 2:
        words = tl.multiple_of(slab.to(tl.pointer_type(tl.uint8)), 16)
    elif BITS == 4:
        words = tl.multiple_of(slab.to(tl.pointer_type(tl.uint16)), 16)
    elif BITS == 8:
        words = tl.multiple_of(slab.to(tl.pointer_type(tl.uint32)), 16)
    elif BITS == 16:
        words = tl.multiple_of(slab.to(tl.pointer_type(tl.uint64)), 16)
    else:
        words = tl.multiple_of(slab.to(tl.pointer_type(tl.float32)), 16)
    if SCALE == "f16":
        scales = tl.multiple_of(slab.to(tl.pointer_type(tl.float16)), 16)
        SCALE_BYTES: tl.constexpr = 2
    else:
        scales = tl.multiple_of(slab.to(tl.pointer_type(tl.float32)), 16)
        SCALE_BYTES: tl.constexpr = 4
    WORD_BYTES: tl.constexpr = BITS // 2 if BITS < 32 else 4
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    words += DATA // WORD_BYTES + matrix * ((NEXT_DATA - DATA) // WORD_BYTES)
    scales += SCALES // SCALE_BYTES + matrix * ((NEXT_SCALES - SCALES) // SCALE_BYTES)
    return weight_rows(words, w_row, K, BITS), scales + w_row * GROUPS


@triton.jit
def expert_hidden_kernel(
    x_ptr,
    table_ptr,
    tile_experts_ptr,
    pairs_ptr,
    hidden_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATE_SCALES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS_PER_TOK: tl.constexpr,
):
    """BLOCK_N hidden columns of up to BLOCK_M pairs of one expert."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    slab = tl.load(table_ptr + expert)
    if slab == 0:
        return
    pair = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    x_rows = x_ptr + (tl.maximum(pair, 0) // EXPERTS_PER_TOK).to(tl.int64) * K
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(output, N - 1).to(tl.int64)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    # one loop for both matrices: half the code, and each leaves the other's registers alone
    for matrix in tl.range(2):
        words, scales = slab_rows(slab, matrix, GATE, UP, GATE_SCALES, UP_SCALES, w_row, K, BITS, GROUP, SCALE)
        gate = up
        up = product(x_rows, words, scales, K, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL)
    hidden = silu_mul(gate, up).to(hidden_ptr.dtype.element_ty)
    begin = pair.to(tl.int64)[:, None] * N
    is_stored = (pair >= 0)[:, None] & (output < N)[None, :]
    tl.store(hidden_ptr + begin + split_columns(output, N)[None, :], hidden, mask=is_stored)


@triton.jit
def expert_output_kernel(
    hidden_ptr,
    table_ptr,
    tile_experts_ptr,
    pairs_ptr,
    outputs_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    DOWN: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """BLOCK_N output columns of up to BLOCK_M pairs of one expert."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    slab = tl.load(table_ptr + expert)
    if slab == 0:
        return
    pair = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(output, N - 1).to(tl.int64)
    words, scales = slab_rows(slab, 0, DOWN, DOWN, DOWN_SCALES, DOWN_SCALES, w_row, K, BITS, GROUP, SCALE)
    x_rows = hidden_ptr + tl.maximum(pair, 0).to(tl.int64) * K
    acc = product(x_rows, words, scales, K, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL)
    begin = pair.to(tl.int64)[:, None] * N
    is_stored = (pair >= 0)[:, None] & (output < N)[None, :]
    tl.store(outputs_ptr + begin + output[None, :], acc, mask=is_stored)


@triton.jit
def mlp_hidden_kernel(
    x_ptr,
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    hidden_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_N hidden columns of BLOCK_M rows of a dense MLP."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64) * K
    w_row = tl.minimum(output, N - 1).to(tl.int64)
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    words, scales = weight_rows(gate_ptr, w_row, K, BITS), gate_scales_ptr + w_row * GROUPS
    gate = product(x_rows, words, scales, K, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL)
    words, scales = weight_rows(up_ptr, w_row, K, BITS), up_scales_ptr + w_row * GROUPS
    up = product(x_rows, words, scales, K, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL)
    hidden = silu_mul(gate, up).to(hidden_ptr.dtype.element_ty)
    is_stored = (row < num_rows)[:, None] & (output < N)[None, :]
    tl.store(hidden_ptr + row.to(tl.int64)[:, None] * N + split_columns(output, N)[None, :], hidden, mask=is_stored)


@triton.jit
def combine_kernel(
    outputs_ptr,
    weights_ptr,
    add_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    EXPERTS_PER_TOK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row: its experts' outputs weighted and added in the order of its choices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    first = row * EXPERTS_PER_TOK
    outputs = outputs_ptr + first * WIDTH + column
    acc = tl.load(outputs, mask=is_column, other=0.0) * tl.load(weights_ptr + first)
    for choice in tl.static_range(1, EXPERTS_PER_TOK):
        weight = tl.load(weights_ptr + first + choice)
        acc = tl.load(outputs + choice * WIDTH, mask=is_column, other=0.0) * weight + acc
    acc = acc + tl.load(add_ptr + row * WIDTH + column, mask=is_column, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, acc, mask=is_column)
