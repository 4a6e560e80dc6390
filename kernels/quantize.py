"""Putting numbers into packed formats, to nearest or with searched scales, and bf16; decoding FP8. On one thread."""

from collections.abc import Callable

import numpy as np

from glm_gpu.fp8 import E4M3, dequantize_fp8, scale_grid
from glm_gpu.kernels import cpu
from glm_gpu.quant import Format, QuantizedMatrix, f32_to_bf16, pack
from glm_gpu.quant import quantize as quantize_on_numpy
from glm_gpu.recipe import Rounding

# Factors of the scale that the largest magnitude asks for. Finer steps gain less than 2 % of the squared error. Where
# the best lies, for Gaussian weights: groups at 4 bits from 0.65 to 1, rows of 6144 at 4 bits near 0.6 and at 2 bits
# near 0.27; heavier tails want less. At 8 bits nothing below 0.95 is ever best, and 0.95 saves less than 4 %: not worth
# a search.
_STEPS_TO_60 = tuple(step / 20 for step in range(20, 11, -1))
_STEPS_TO_10 = tuple(step / 20 for step in range(20, 1, -1))
# rows of about so many weights at a time, so that every candidate after the first finds them in the cache
_BLOCK_WEIGHTS = 1 << 17
_MIN_SCALE = {np.dtype(np.float32): np.float32(1e-8), np.dtype(np.float16): np.float32(2.0**-24)}


def quantize(weight: np.ndarray, format: Format, scale_dtype=np.float32) -> QuantizedMatrix:
    """A weight in the given format, rounded to nearest; the specification is `quant.quantize`. Raises as it does."""
    if not (cpu.active and format.is_packed):
        return quantize_on_numpy(weight, format, scale_dtype)
    weight = np.ascontiguousarray(weight, np.float32)
    scales = np.empty((len(weight), format.num_groups(weight.shape[1])), np.float32)
    is_finite = cpu.active.group_absmax(weight, _group(weight, format), scales)
    scales /= np.float32(format.qmax)
    np.maximum(scales, _MIN_SCALE[np.dtype(np.float32)], out=scales)
    scale_dtype = np.dtype(scale_dtype)
    if not is_finite or (scale_dtype == np.float16 and scales.max(initial=0.0) >= 65520):
        return quantize_on_numpy(weight, format, scale_dtype)  # raises, with the index
    if scale_dtype == np.float16:
        scales = np.maximum(scales.astype(np.float16), np.float16(2.0**-24))
    return quantize_with_scales(weight, format, scales)


def quantizer(rounding: Rounding) -> Callable[[np.ndarray, Format], QuantizedMatrix]:
    """What puts a weight, [O, I] f32, into a format: `quantize` for "rtn", `quantize_search` for "search"."""
    return quantize_search if rounding == "search" else quantize


def shrink_factors(format: Format) -> tuple[float, ...]:
    """The candidates of `quantize_search`, as factors of the scale the largest magnitude asks for; 1 comes first."""
    if format.bits == 8:
        return (1.0,)
    return _STEPS_TO_60 if format.group else _STEPS_TO_10


def quantize_search(weight: np.ndarray, format: Format, scale_dtype=np.float32) -> QuantizedMatrix:
    """A weight in a packed format, each group with the scale whose rounded values are nearest in squared error.

    Candidates are `quantize`'s scale times each of `shrink_factors`; the largest of equally good ones wins, so a group
    that is exact at the full scale keeps it. At 8 bits the result is that of `quantize`.

    Args:
        weight: [O, I] f32, finite.
        format: packed; plain formats come out as from `quantize`.
        scale_dtype: float32 or float16.

    Raises:
        ValueError: as `quantize` does.
    """
    nearest = quantize(weight, format, scale_dtype)
    if not format.is_packed or shrink_factors(format) == (1.0,):
        return nearest
    weight = np.ascontiguousarray(weight, np.float32)
    scales = nearest.scales.copy()
    step = max(1, _BLOCK_WEIGHTS // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        scales[rows] = _best_scales(weight[rows], nearest.scales[rows], format)
    return quantize_with_scales(weight, format, scales)


def quantize_with_scales(weight: np.ndarray, format: Format, scales: np.ndarray) -> QuantizedMatrix:
    """A weight in a packed format under given scales, [O, groups] f32 or f16: q = clip(rint(w / scale))."""
    divisors = scales.astype(np.float32, copy=False)
    if cpu.active:
        data = np.empty((len(weight), format.row_bytes(weight.shape[1])), np.uint8)
        cpu.active.pack_rows(weight, divisors, _group(weight, format), format.bits, data)
        return QuantizedMatrix(format, weight.shape, data, scales)
    divisors = np.repeat(divisors, _group(weight, format), axis=1)[:, : weight.shape[1]]
    integers = np.divide(weight, divisors)
    np.rint(integers, out=integers)
    np.clip(integers, -format.qmax - 1, format.qmax, out=integers)
    return QuantizedMatrix(format, weight.shape, pack(integers.astype(np.int8), format), scales)


def group_errors(weight: np.ndarray, format: Format, scales: np.ndarray) -> np.ndarray:
    """What each group would lose under its scale: the sum over its columns of (q * scale - w)^2.

    Products and differences are f32; squares and sums f64, in one fixed order: of the group, padded with zeros, halves
    are added until one number is left, and what is over at an odd size is added to the first.

    Args:
        weight: [O, I] f32.
        scales: [O, groups] f32.

    Returns:
        [O, groups] f64.
    """
    group = _group(weight, format)
    if cpu.active:
        errors = np.empty(scales.shape, np.float64)
        cpu.active.group_errors(weight, scales, group, format.qmax, errors)
        return errors
    num_rows, num_columns = weight.shape
    padded = np.zeros((num_rows, scales.shape[1] * group), np.float32)
    padded[:, :num_columns] = weight
    padded = padded.reshape(num_rows, -1, group)
    with np.errstate(over="ignore", invalid="ignore"):  # beside f32's largest, products may be infinite: never best
        values = np.rint(padded / scales[:, :, None])
        np.clip(values, -format.qmax - 1, format.qmax, out=values)
        values *= scales[:, :, None]
        values -= padded
    errors = values.astype(np.float64)
    errors *= errors
    while errors.shape[2] > 1:
        half = errors.shape[2] // 2
        sums = errors[:, :, :half] + errors[:, :, half : 2 * half]
        if errors.shape[2] % 2:
            sums[:, :, 0] += errors[:, :, -1]
        errors = sums
    return errors[:, :, 0]


def round_bf16(values: np.ndarray) -> np.ndarray:
    """Bit patterns of the nearest bf16 values, [T, W] uint16 from f32; the specification is `quant.f32_to_bf16`."""
    if not cpu.active:
        return f32_to_bf16(values)
    out = np.empty(values.shape, np.uint16)
    cpu.active.round_bf16(np.ascontiguousarray(values), out)
    return out


def decode_fp8(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], first_row: int, num_rows: int
) -> np.ndarray:
    """Rows of an FP8 matrix as numbers; arguments, result and specification are those of `fp8.dequantize_fp8`."""
    if not cpu.active:
        return dequantize_fp8(codes, scales, block, first_row, num_rows)
    grid, (block_rows, block_columns) = scale_grid(scales, (num_rows, codes.shape[1]), block)
    out = np.empty(codes.shape, np.float32)
    cpu.active.decode_fp8(codes, E4M3, grid, block_rows, block_columns, first_row, out)
    return out


def _group(weight: np.ndarray, format: Format) -> int:
    return format.group or max(weight.shape[1], 1)


def _best_scales(weight: np.ndarray, full_scales: np.ndarray, format: Format) -> np.ndarray:
    widest = full_scales.astype(np.float32)
    best, best_errors = full_scales, group_errors(weight, format, widest)
    for factor in shrink_factors(format)[1:]:
        scales = np.maximum(widest * np.float32(factor), _MIN_SCALE[full_scales.dtype]).astype(full_scales.dtype)
        errors = group_errors(weight, format, scales.astype(np.float32, copy=False))
        is_better = errors < best_errors
        best = np.where(is_better, scales, best)
        best_errors = np.where(is_better, errors, best_errors)
    return best
