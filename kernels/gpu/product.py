"""Shapes of the tiles in which a weight meets activations, by the weight's format and shape alone.

Nothing here depends on the number of rows: a tile always has room for BLOCK_M of them, so a row's bits are the same
in every pass.
"""

from glm_gpu.kernels.gpu.arrays import DeviceMatrix, View, retype
from glm_gpu.quant import Format

BLOCK_M = 16
BLOCK_N = 64
# Two warps for 64 rows of weights: each thread unpacks 64 weights a step, which spreads the step's overhead. With 128
# weights unrolled twice (four groups of 64) a step costs 2.45 instructions a weight on sm_90; with four warps, 2.85.
# Shared memory allows three to six programs a multiprocessor, for which 168 registers a thread are enough.
SCHEDULE = {"num_warps": 2, "num_stages": 3, "max_registers": 168}
# Words of a row: four int4 in 16 bits, four int8 in 32, four bf16 in 64.
_WORDS = {4: "u16", 8: "u32", 16: "u64"}


def words(matrix: DeviceMatrix) -> View:
    """A matrix's data as words of four weights."""
    assert matrix.shape[1] % 4 == 0, f"a weight of {matrix.shape[1]} columns; devices need a multiple of 4"
    return retype(matrix.data, _WORDS[matrix.format.bits])


def product_constants(format: Format, num_inputs: int) -> dict[str, int]:
    """What every kernel with a packed weight [N, K] is compiled with.

    Args:
        format: of the weight.
        num_inputs: K.
    """
    assert format.bits in _WORDS and num_inputs % 4 == 0, (format.name, num_inputs)
    block_k = format.group or (128 if format.bits == 4 else 64)
    return {
        "BITS": format.bits,
        "GROUP": format.group or 0,
        "K": num_inputs,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": block_k,
        "UNROLL": 256 // block_k if format.bits == 4 else 1,
    }


def tiles(count: int, block: int = BLOCK_M) -> int:
    """How many blocks hold `count` items."""
    return -(-count // block)
