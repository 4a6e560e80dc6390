"""Projections, the absorbed products of latent attention, and embeddings."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.product import dot_f32, product, split_columns, unpack, weight_rows


@triton.jit
def project_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    add_ptr,
    experts_ptr,
    weights_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    NUM_BATCHES: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    ROWS_PER_BATCH: tl.constexpr,
    HAS_ADD: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """One tile of x @ w.T: batch b reads columns [b K, b K + K) of x and N weight rows from b ROWS_PER_BATCH on."""
    batch = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and outputs past the end repeat the last one: loads need no mask, and their results are not stored.
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    w_row = (batch * ROWS_PER_BATCH + FIRST_ROW + tl.minimum(output, N - 1)).to(tl.int64)
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    acc = product(
        x_ptr + x_row * (NUM_BATCHES * K) + batch * K,
        weight_rows(w_ptr, w_row, K, BITS),
        s_ptr + w_row * GROUPS,
        K,
        BITS,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        UNROLL,
    )
    column = batch * N + output
    is_stored = (row < num_rows)[:, None] & (output < N)[None, :]
    begin = row.to(tl.int64)[:, None] * (NUM_BATCHES * N)
    if HAS_ADD:
        acc = acc + tl.load(add_ptr + begin + column[None, :], mask=is_stored, other=0.0)
    if NUM_CHOICES > 0:
        # as combine_kernel adds them
        first = row.to(tl.int64) * NUM_CHOICES
        experts = experts_ptr + first[:, None] * N + column[None, :]
        weight = tl.load(weights_ptr + first, mask=row < num_rows, other=0.0)
        mixed = tl.load(experts, mask=is_stored, other=0.0) * weight[:, None]
        for choice in tl.static_range(1, NUM_CHOICES):
            weight = tl.load(weights_ptr + first + choice, mask=row < num_rows, other=0.0)
            mixed = tl.load(experts + choice * N, mask=is_stored, other=0.0) * weight[:, None] + mixed
        acc = mixed + acc
    if IS_SPLIT:
        column = split_columns(column, NUM_BATCHES * N)
    tl.store(out_ptr + begin + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def plain_tile(
    x_ptr,
    w_ptr,
    s_ptr,
    out_ptr,
    tile,
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
    """One tile of x @ w.T, stored as it is."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    w_row = tl.minimum(output, N - 1).to(tl.int64)
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    words, scales = weight_rows(w_ptr, w_row, K, BITS), s_ptr + w_row * GROUPS
    acc = product(x_ptr + x_row * K, words, scales, K, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL)
    is_stored = (row < num_rows)[:, None] & (output < N)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * N + output[None, :], acc, mask=is_stored)


@triton.jit
def project_both_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    out_ptr,
    other_w_ptr,
    other_s_ptr,
    other_out_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    OTHER_N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One tile of x @ w.T, or behind those, of x @ other_w.T."""
    tile = tl.program_id(0)
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if tile < TILES:
        plain_tile(
            x_ptr, w_ptr, s_ptr, out_ptr, tile, num_rows,
            K, N, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL,
        )  # fmt: skip
    else:
        plain_tile(
            x_ptr, other_w_ptr, other_s_ptr, other_out_ptr, tile - TILES, num_rows,
            K, OTHER_N, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL,
        )  # fmt: skip


@triton.jit
def rotate_rows(
    q_rows,
    out_rows,
    cos_ptr,
    sin_ptr,
    row,
    is_row,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """The pairs (2j, 2j + 1) of 2 HALF columns of one head of some rows, rotated."""
    pair = tl.arange(0, BLOCK_HALF)
    mask = is_row[:, None] & (pair < HALF)[None, :]
    angle = row.to(tl.int64)[:, None] * HALF + pair[None, :]
    cos, sin = tl.load(cos_ptr + angle, mask=mask, other=1.0), tl.load(sin_ptr + angle, mask=mask, other=0.0)
    even = tl.load(q_rows[:, None] + 2 * pair[None, :], mask=mask, other=0.0)
    odd = tl.load(q_rows[:, None] + 2 * pair[None, :] + 1, mask=mask, other=0.0)
    out = out_rows[:, None] + 2 * pair[None, :]
    tl.store(out, (even * cos - odd * sin).to(out_rows.dtype.element_ty), mask=mask)
    tl.store(out + 1, (odd * cos + even * sin).to(out_rows.dtype.element_ty), mask=mask)


@triton.jit
def absorb_kernel(
    q_ptr,
    w_ptr,
    s_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_rows,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROWS_PER_HEAD: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """64 latent columns of one head's queries, or behind those their rotated columns.

    The sum runs over weight rows, so their scales go into the query.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    head = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    word = tl.program_id(0) * 16 + tl.arange(0, 16)
    is_word = word < RANK // 4
    is_row = row < num_rows
    q_row = (row.to(tl.int64) * NUM_HEADS + head) * Q_WIDTH
    out_row = out_ptr + (row.to(tl.int64) * NUM_HEADS + head) * OUT_WIDTH
    if tl.program_id(0) == (RANK + 63) // 64:
        rotate_rows(q_ptr + q_row + NOPE, out_row + RANK, cos_ptr, sin_ptr, row, is_row, HALF, BLOCK_HALF)
        return
    acc0 = tl.zeros((BLOCK_M, 16), tl.float32)
    acc1 = tl.zeros((BLOCK_M, 16), tl.float32)
    acc2 = tl.zeros((BLOCK_M, 16), tl.float32)
    acc3 = tl.zeros((BLOCK_M, 16), tl.float32)
    for begin in tl.range(0, NOPE, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)
        is_d = d < NOPE
        w_row = (head * ROWS_PER_HEAD + d).to(tl.int64)
        q = tl.load(q_ptr + q_row[:, None] + d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0)
        if BITS < 16:
            if GROUP == 0:
                scale = tl.load(s_ptr + w_row, mask=is_d, other=0.0)
            else:
                GROUPS: tl.constexpr = (RANK + GROUP - 1) // GROUP
                scale = tl.load(s_ptr + w_row * GROUPS + tl.program_id(0) * 64 // GROUP, mask=is_d, other=0.0)
            q = q * scale.to(tl.float32)[None, :]
        q = q.to(dtype)
        w_rows, is_weight = weight_rows(w_ptr, w_row, RANK, BITS), is_d[:, None] & is_word[None, :]
        if BITS == 32:
            w_tile = w_rows[:, None] + 4 * word[None, :]
            acc0 = dot_f32(q, tl.load(w_tile, mask=is_weight, other=0.0), acc0, dtype)
            acc1 = dot_f32(q, tl.load(w_tile + 1, mask=is_weight, other=0.0), acc1, dtype)
            acc2 = dot_f32(q, tl.load(w_tile + 2, mask=is_weight, other=0.0), acc2, dtype)
            acc3 = dot_f32(q, tl.load(w_tile + 3, mask=is_weight, other=0.0), acc3, dtype)
        else:
            words = tl.load(w_rows[:, None] + word[None, :], mask=is_weight, other=0)
            n0, n1, n2, n3 = unpack(words, BITS, dtype)
            acc0 = tl.dot(q, n0, acc0)
            acc1 = tl.dot(q, n1, acc1)
            acc2 = tl.dot(q, n2, acc2)
            acc3 = tl.dot(q, n3, acc3)
    out = out_row[:, None] + 4 * word[None, :]
    is_stored = is_row[:, None] & is_word[None, :]
    tl.store(out, acc0.to(dtype), mask=is_stored)
    tl.store(out + 1, acc1.to(dtype), mask=is_stored)
    tl.store(out + 2, acc2.to(dtype), mask=is_stored)
    tl.store(out + 3, acc3.to(dtype), mask=is_stored)


@triton.jit
def embed_kernel(
    ids_ptr,
    w_ptr,
    s_ptr,
    out_ptr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Up to 4 BLOCK columns of one token's embedding; integers are exact in bf16, their scale is applied in f32."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < WIDTH // 4
    w_row = tl.load(ids_ptr + row).to(tl.int64)
    w_begin = weight_rows(w_ptr, w_row, WIDTH, BITS)
    if BITS == 32:
        n0 = tl.load(w_begin + 4 * word, mask=is_word, other=0.0)
        n1 = tl.load(w_begin + 4 * word + 1, mask=is_word, other=0.0)
        n2 = tl.load(w_begin + 4 * word + 2, mask=is_word, other=0.0)
        n3 = tl.load(w_begin + 4 * word + 3, mask=is_word, other=0.0)
    else:
        n0, n1, n2, n3 = unpack(tl.load(w_begin + word, mask=is_word, other=0), BITS, tl.bfloat16)
    out = out_ptr + row * WIDTH + 4 * word
    if BITS < 16:
        if GROUP == 0:
            scale = tl.load(s_ptr + w_row).to(tl.float32)
        else:
            GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
            scale = tl.load(s_ptr + w_row * GROUPS + 4 * word // GROUP, mask=is_word, other=0.0).to(tl.float32)
        tl.store(out, n0.to(tl.float32) * scale, mask=is_word)
        tl.store(out + 1, n1.to(tl.float32) * scale, mask=is_word)
        tl.store(out + 2, n2.to(tl.float32) * scale, mask=is_word)
        tl.store(out + 3, n3.to(tl.float32) * scale, mask=is_word)
    else:
        tl.store(out, n0.to(tl.float32), mask=is_word)
        tl.store(out + 1, n1.to(tl.float32), mask=is_word)
        tl.store(out + 2, n2.to(tl.float32), mask=is_word)
        tl.store(out + 3, n3.to(tl.float32), mask=is_word)
