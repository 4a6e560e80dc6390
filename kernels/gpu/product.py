"""Shapes of the tiles in which a weight meets activations.

A tile has room for 16 rows, or for 64 where many rows share a weight, which unpacks it once for all of them. Both are
made of the same tensor-core instruction over the same columns in the same order, so a row's bits are the same in
either, and in any company. (Tiles of 64 rows run on two warps: with four, Hopper would take another instruction.)
"""

from functools import cache

from glm_gpu.kernels.gpu.arrays import ITEM_BYTES, DeviceMatrix, Kernel, View, retype
from glm_gpu.quant import Format

BLOCK_M = 16
WIDE_BLOCK_M = 64
BLOCK_N = 64
# Two warps for 64 rows of weights: each thread unpacks 64 weights a step, which spreads the step's overhead. Unrolled
# to four groups of 64, a step of 16 rows costs 2.4 instructions a weight on sm_90; with four warps, 2.85.
_NUM_WARPS = 2
_NUM_STAGES = 3
# Shared memory allows three to six programs a multiprocessor, for which 168 registers a thread are enough.
_MAX_REGISTERS = {BLOCK_M: 168, WIDE_BLOCK_M: 255}
# Columns of int4 that a loop takes before it jumps back; 64 rows have no registers for more.
_UNROLLED = {BLOCK_M: 256, WIDE_BLOCK_M: 128}
# Words of a row: four int2 in 8 bits, four int4 in 16, four int8 in 32, four bf16 in 64; f32 numbers are left alone.
_WORDS = {2: "u8", 4: "u16", 8: "u32", 16: "u64", 32: "f32"}


def words(matrix: DeviceMatrix) -> View:
    """A matrix's data as words of four weights, or as it is."""
    assert matrix.shape[1] % 4 == 0, f"a weight of {matrix.shape[1]} columns; devices need a multiple of 4"
    return retype(matrix.data, _WORDS[matrix.format.bits])


def word_bytes(format: Format) -> int:
    """Bytes of one of those."""
    return ITEM_BYTES[_WORDS[format.bits]]


def tile_rows(num_rows: float) -> int:
    """Rows of a tile, where about so many share a weight."""
    return WIDE_BLOCK_M if num_rows > 2 * BLOCK_M else BLOCK_M


@cache
def product_kernel(module: str, name: str, block_m: int) -> Kernel:
    """A kernel around `product`, scheduled for tiles of so many rows."""
    return Kernel(module, name, _NUM_WARPS, _NUM_STAGES, _MAX_REGISTERS[block_m])


def product_constants(format: Format, num_inputs: int, block_m: int, block_n: int = BLOCK_N) -> dict[str, int]:
    """What every kernel with a packed weight [N, K] is compiled with.

    Args:
        format: of the weight.
        num_inputs: K.
        block_m, block_n: rows and outputs of a tile.
    """
    assert format.bits in _WORDS and num_inputs % 4 == 0, (format.name, num_inputs)
    # f32 numbers become three each: more of them at a time would not fit the registers
    block_k = format.group or {32: 32, 16: 64, 8: 64}.get(format.bits, 128)
    return {
        "BITS": format.bits,
        "GROUP": format.group or 0,
        "K": num_inputs,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "UNROLL": _UNROLLED[block_m] // block_k if format.bits == 4 else 1,
    }


def tiles(count: int, block: int = BLOCK_M) -> int:
    """How many blocks hold `count` items."""
    return -(-count // block)
