"""Sorting (token, choice) pairs by expert into tiles, without atomics: every place is counted, so it never varies.

The rank of a pair is how many earlier pairs have its expert; a pair whose rank is a multiple of BLOCK_M begins a tile;
the tiles of a pair's expert come after those of all lower experts.
"""

import triton
import triton.language as tl


@triton.jit
def gather_tile(ids, pair, place, tile, BLOCK_M: tl.constexpr):
    """From pairs with their places: the pair in each slot of a tile, or -1, and the tile's expert, or -1."""
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_here = place[None, :] == slot[:, None]
    pairs = tl.max(tl.where(is_here, pair[None, :], -1), 1)
    expert = tl.max(tl.where(place == tile * BLOCK_M, ids, -1), 0)
    return pairs, expert


@triton.jit
def plan_small_kernel(ids_ptr, tile_experts_ptr, pairs_ptr, num_pairs, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """One tile of a pass with at most BLOCK pairs; each program places all pairs for itself."""
    tile = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    # pairs past the end get the highest expert and so the last places
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0x7FFFFFFF)
    # as one vector along each axis of the comparison
    is_same = ids[:, None] == ids[None, :]
    rank = tl.sum((is_same & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
    rank_across = tl.sum((is_same & (pair[:, None] < pair[None, :])).to(tl.int32), 0)
    begins = rank_across % BLOCK_M == 0
    lower = tl.sum(((ids[None, :] < ids[:, None]) & begins[None, :]).to(tl.int32), 1)
    place = (lower + rank // BLOCK_M) * BLOCK_M + rank % BLOCK_M
    place = tl.where(pair < num_pairs, place, -1)
    pairs, expert = gather_tile(ids, pair, place, tile, BLOCK_M)
    tl.store(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M), pairs)
    tl.store(tile_experts_ptr + tile, expert)


@triton.jit
def rank_kernel(ids_ptr, scratch_ptr, num_pairs, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """scratch[0, p] = rank of pair p."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    rank = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.cdiv(num_pairs, BLOCK)):
        other = block * BLOCK + tl.arange(0, BLOCK)
        other_ids = tl.load(ids_ptr + other, mask=other < num_pairs, other=-2)
        is_earlier = (ids[:, None] == other_ids[None, :]) & (other[None, :] < pair[:, None])
        rank = rank + tl.sum(is_earlier.to(tl.int32), 1)
    tl.store(scratch_ptr + pair, rank, mask=pair < num_pairs)


@triton.jit
def place_kernel(ids_ptr, scratch_ptr, num_pairs, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """scratch[1, p] = tile of pair p * BLOCK_M + its slot there."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    rank = tl.load(scratch_ptr + pair, mask=pair < num_pairs, other=0)
    lower = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.cdiv(num_pairs, BLOCK)):
        other = block * BLOCK + tl.arange(0, BLOCK)
        other_ids = tl.load(ids_ptr + other, mask=other < num_pairs, other=0x7FFFFFFF)
        begins = tl.load(scratch_ptr + other, mask=other < num_pairs, other=1) % BLOCK_M == 0
        lower = lower + tl.sum(((other_ids[None, :] < ids[:, None]) & begins[None, :]).to(tl.int32), 1)
    place = (lower + rank // BLOCK_M) * BLOCK_M + rank % BLOCK_M
    tl.store(scratch_ptr + num_pairs + pair, place, mask=pair < num_pairs)


@triton.jit
def gather_kernel(
    ids_ptr, scratch_ptr, tile_experts_ptr, pairs_ptr, num_pairs, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):
    """One tile's pairs and its expert."""
    tile = tl.program_id(0)
    pairs = tl.full((BLOCK_M,), -1, tl.int32)
    expert = -1
    for block in range(tl.cdiv(num_pairs, BLOCK)):
        pair = block * BLOCK + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
        place = tl.load(scratch_ptr + num_pairs + pair, mask=pair < num_pairs, other=-1)
        block_pairs, block_expert = gather_tile(ids, pair, place, tile, BLOCK_M)
        pairs = tl.maximum(pairs, block_pairs)
        expert = tl.maximum(expert, block_expert)
    tl.store(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M), pairs)
    tl.store(tile_experts_ptr + tile, expert)
