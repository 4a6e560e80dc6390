"""The best token of a row of logits."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.router import best


@triton.jit
def best_of_block_kernel(logits_ptr, values_ptr, block_ids_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of BLOCK logits, NaN above all, and its lowest id."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < VOCAB
    logits = tl.load(logits_ptr + row * VOCAB + token, mask=is_token, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("inf"))
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(values_ptr + place, tl.max(logits, 0))
    tl.store(block_ids_ptr + place, best(logits, is_token, token, VOCAB))


@triton.jit
def best_of_row_kernel(values_ptr, block_ids_ptr, ids_ptr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The best of the blocks' bests, or -1 where that is no finite number."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    is_block = block < NUM_BLOCKS
    values = tl.load(values_ptr + row * NUM_BLOCKS + block, mask=is_block, other=float("-inf"))
    winner = best(values, is_block, block, NUM_BLOCKS)
    largest = tl.max(values, 0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(ids_ptr + row, tl.where(is_finite, tl.load(block_ids_ptr + row * NUM_BLOCKS + winner), -1))
