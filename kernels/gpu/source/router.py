"""F32 products, and each token's choice of experts."""

import triton
import triton.language as tl


@triton.jit
def project_f32_kernel(
    x_ptr,
    w_ptr,
    parts_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of x @ w.T over PIECE columns, in plain f32: no tensor core, whose f32 is shorter."""
    piece = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    x_rows = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64) * WIDTH
    w_rows = w_ptr + tl.minimum(output, NUM_OUTPUTS - 1).to(tl.int64) * WIDTH
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for step in tl.range(0, PIECE // BLOCK_K):
        k = piece * PIECE + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows[:, None] + k[None, :], mask=(k < WIDTH)[None, :], other=0.0)
        w = tl.load(w_rows[None, :] + k[:, None], mask=(k < WIDTH)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    parts = parts_ptr + (piece.to(tl.int64) * num_rows + row)[:, None] * NUM_OUTPUTS + output[None, :]
    tl.store(parts, acc, mask=(row < num_rows)[:, None] & (output < NUM_OUTPUTS)[None, :])


@triton.jit
def add_parts_kernel(parts_ptr, out_ptr, num_items, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over pieces, in order."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_item = item < num_items
    acc = tl.load(parts_ptr + item, mask=is_item, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        acc = acc + tl.load(parts_ptr + part * num_items + item, mask=is_item, other=0.0)
    tl.store(out_ptr + item, acc, mask=is_item)


@triton.jit
def best(values, is_free, index, COUNT: tl.constexpr):
    """The lowest index of the largest value among those that are free; NaN counts as -inf."""
    values = tl.where(is_free & (values == values), values, float("-inf"))
    largest = tl.max(values, 0)
    return tl.min(tl.where(is_free & (values == largest), index, COUNT), 0)


@triton.jit
def choose_kernel(
    parts_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    scale,
    NUM_PARTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS_PER_TOK: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMED: tl.constexpr,
):
    """One token's experts, from the pieces of its logits."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    logits = tl.load(parts_ptr + row * NUM_EXPERTS + expert, mask=is_expert, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        logits = logits + tl.load(parts_ptr + (part * num_rows + row) * NUM_EXPERTS + expert, mask=is_expert, other=0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    else:
        shifted = logits - tl.max(tl.where(is_expert, logits, float("-inf")), 0)
        exponentials = tl.where(is_expert, tl.exp(shifted), 0.0)
        scores = exponentials / tl.sum(exponentials, 0)
        choice = scores
    if NUM_GROUPS > 1:
        # groups by the sum of their two largest: the largest is taken out once, at its lowest place
        grouped = tl.reshape(choice, (NUM_GROUPS, NUM_EXPERTS // NUM_GROUPS))
        place = tl.arange(0, NUM_EXPERTS // NUM_GROUPS)[None, :]
        largest = tl.max(grouped, 1)
        first = tl.min(tl.where(grouped == largest[:, None], place, NUM_EXPERTS), 1)
        second = tl.max(tl.where(place == first[:, None], float("-inf"), grouped), 1)
        group = tl.arange(0, NUM_GROUPS)
        is_kept = group < 0
        for _ in tl.static_range(KEPT_GROUPS):
            is_kept = is_kept | (group == best(largest + second, is_kept == 0, group, NUM_GROUPS))
        grouped = tl.where(is_kept[:, None], grouped, float("-inf"))
        choice = tl.reshape(grouped, (BLOCK,))
    is_free = is_expert
    slot = tl.arange(0, BLOCK_CHOICES)
    ids = tl.zeros((BLOCK_CHOICES,), tl.int32)
    weights = tl.zeros((BLOCK_CHOICES,), tl.float32)
    total = 0.0
    for k in tl.static_range(EXPERTS_PER_TOK):
        chosen = best(choice, is_free, expert, NUM_EXPERTS)
        is_free = is_free & (expert != chosen)
        weight = tl.sum(tl.where(expert == chosen, scores, 0.0), 0)
        total = total + weight
        ids = tl.where(slot == k, chosen, ids)
        weights = tl.where(slot == k, weight, weights)
    if IS_NORMED:
        if IS_SIGMOID:
            total = total + 1e-20
        weights = weights / total
    if IS_SIGMOID:
        weights = weights * scale
    is_slot = slot < EXPERTS_PER_TOK
    tl.store(ids_ptr + row * EXPERTS_PER_TOK + slot, ids, mask=is_slot)
    tl.store(weights_ptr + row * EXPERTS_PER_TOK + slot, weights, mask=is_slot)
