"""FP8 weights (e4m3): decoding, and the scales that come with them."""

import numpy as np

_BLOCK_WEIGHTS = 1 << 19


def _e4m3_table() -> np.ndarray:
    """f32 [256]: sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities, 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3_table()
E4M3.flags.writeable = False


def has_known_scale_shape(weight_shape: tuple, scale_shape: tuple, block: tuple[int, int]) -> bool:
    """Whether scales of that shape can belong to such a weight: a grid of blocks, one for each row, or just one."""
    num_rows, num_columns = weight_shape
    grid = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    return scale_shape in (grid, (num_rows,), (num_rows, 1), (), (1,), (1, 1))


def scale_grid(
    scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Scales of any known shape as a grid, and the rows and columns that share one of its entries.

    Args:
        scales: of a weight of that shape; see `has_known_scale_shape`.
        block: rows and columns of a block, for scales that are a grid already.
    """
    assert has_known_scale_shape(shape, scales.shape, block), (shape, scales.shape, block)
    num_rows, num_columns = shape
    if scales.size > 1 and scales.shape == (-(-num_rows // block[0]), -(-num_columns // block[1])):
        return scales, block
    scales = scales.reshape(-1, 1)
    return scales, (1 if len(scales) == num_rows else max(num_rows, 1), max(num_columns, 1))


def dequantize_fp8(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], first_row: int = 0, num_rows: int | None = None
) -> np.ndarray:
    """Rows of an FP8 matrix [O, I] as numbers: each the f32 product of its decoded code and its block's scale.

    Args:
        codes: [rows, I] uint8, all rows or consecutive ones.
        scales: of the whole matrix, f32: [ceil(O / block rows), ceil(I / block columns)] with smaller last blocks, or
            [O] or [O, 1] for one a row, or a single value.
        block: rows and columns that share a scale.
        first_row: where in the matrix `codes` begins.
        num_rows: O; as many as there are codes when not given.

    Returns:
        [rows, I] f32. NaN codes come out as NaN.

    Source: GLM-5.2-FP8, `weight_scale_inv` (a multiplier, despite its name) and `weight_block_size`.
    """
    num_columns = codes.shape[1]
    scales, (block_rows, block_columns) = scale_grid(scales, (num_rows or len(codes), num_columns), block)
    row_of_scale = np.arange(first_row, first_row + len(codes)) // block_rows
    result = np.empty(codes.shape, np.float32)
    step = max(1, _BLOCK_WEIGHTS // max(1, num_columns))
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        result[rows] = E4M3[codes[rows]]
        result[rows] *= np.repeat(scales[row_of_scale[rows]], block_columns, axis=1)[:, :num_columns]
    return result
