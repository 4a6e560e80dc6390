"""Shapes of the tiles in which a weight meets activations, by the weight's format and shape alone.

Nothing here depends on the number of rows: a tile always has room for BLOCK_M of them, so a row's bits are the same
in every pass.
"""

from glm_gpu.kernels.gpu.arrays import Array, DeviceMatrix, View, retype
from glm_gpu.quant import Format

BLOCK_M = 16
# Words of a row: four int4 in 16 bits, four int8 in 32, four bf16 in 64.
_WORDS = {4: "u16", 8: "u32", 16: "u64"}


def words(matrix: DeviceMatrix) -> View:
    """A matrix's data as words of four weights."""
    assert matrix.shape[1] % 4 == 0, f"a weight of {matrix.shape[1]} columns; devices need a multiple of 4"
    return retype(matrix.data, _WORDS[matrix.format.bits])


def scales(matrix: DeviceMatrix) -> Array | None:
    return matrix.scales


def product_constants(format: Format, shape: tuple[int, int]) -> dict:
    """What every kernel with a packed weight [N, K] is compiled with."""
    num_outputs, num_inputs = shape
    assert format.bits in _WORDS and num_inputs % 4 == 0, (format.name, shape)
    block_k = format.group or (64 if format.bits == 16 else 128)
    return {
        "BITS": format.bits,
        "GROUP": format.group or 0,
        "K": num_inputs,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": 64,
        "BLOCK_K": block_k,
        "EVEN": num_inputs % block_k == 0 and num_outputs % 64 == 0,
    }


def tiles(num_rows: int, block: int = BLOCK_M) -> int:
    return -(-num_rows // block)
