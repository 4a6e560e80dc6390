"""Two ways to put a weight into a packed format: to nearest under the largest magnitude, or with searched scales."""

from typing import Literal

import numpy as np

from glm_gpu.quant import Format, QuantizedMatrix, pack, quantize

Rounding = Literal["rtn", "search"]
DEFAULT_ROUNDING: Rounding = "rtn"
# Of the scale that the largest magnitude asks for. Finer steps gain less than 2 % of the squared error. Where the best
# lies, for Gaussian weights: groups at 4 bits from 0.65 to 1, rows of 6144 at 4 bits near 0.6 and at 2 bits near 0.27;
# heavier tails want less. At 8 bits nothing below 0.95 is ever best, and 0.95 saves less than 4 %: not worth a search.
_STEPS_TO_60 = tuple(step / 20 for step in range(20, 11, -1))
_STEPS_TO_10 = tuple(step / 20 for step in range(20, 1, -1))
_BLOCK_WEIGHTS = 1 << 18


def shrink_factors(format: Format) -> tuple[float, ...]:
    """The candidates of a packed format, as factors of the scale that the largest magnitude asks for; 1 comes first."""
    if format.bits == 8:
        return (1.0,)
    return _STEPS_TO_60 if format.group else _STEPS_TO_10


def quantize_search(weight: np.ndarray, format: Format, scale_dtype=np.float32) -> QuantizedMatrix:
    """A weight in a packed format, each group with the scale whose rounded values are nearest in squared error.

    Candidates are `quantize`'s scale times each of `shrink_factors`; the largest of equally good ones wins, so a group
    that is exact at the full scale keeps it. At 8 bits the result is that of `quantize`. Errors are squared and added
    in f64 in one fixed order: halves of the group, padded with zeros, are added until one number is left.

    Args:
        weight: [O, I] f32, finite.
        format: packed; plain formats come out as from `quantize`.
        scale_dtype: float32 or float16.

    Raises:
        ValueError: as `quantize` does.
    """
    best = quantize(weight, format, scale_dtype)
    if not format.is_packed or shrink_factors(format) == (1.0,):
        return best
    num_rows, num_columns = weight.shape
    scales = best.scales.copy()
    step = max(1, _BLOCK_WEIGHTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        scales[rows] = _best_scales(weight[rows], best.scales[rows], format)
    return quantize_with_scales(weight, format, scales)


def quantize_with_scales(weight: np.ndarray, format: Format, scales: np.ndarray) -> QuantizedMatrix:
    """A weight in a packed format under given scales, [O, groups] f32 or f16: q = clip(rint(w / scale))."""
    integers = np.empty(weight.shape, np.float32)
    group = format.group or max(weight.shape[1], 1)
    divisors = np.repeat(scales.astype(np.float32, copy=False), group, axis=1)[:, : weight.shape[1]]
    np.divide(weight, divisors, out=integers)
    np.rint(integers, out=integers)
    np.clip(integers, -format.qmax - 1, format.qmax, out=integers)
    return QuantizedMatrix(format, weight.shape, pack(integers.astype(np.int8), format), scales)


def _best_scales(rows: np.ndarray, full_scales: np.ndarray, format: Format) -> np.ndarray:
    num_rows, num_columns = rows.shape
    groups = full_scales.shape[1]
    group = format.group or num_columns
    padded = np.zeros((num_rows, groups * group), np.float32)
    padded[:, :num_columns] = rows
    padded = padded.reshape(num_rows, groups, group)
    floor = np.float32(2.0**-24 if full_scales.dtype == np.float16 else 1e-8)
    widest = full_scales.astype(np.float32)
    best, best_error = full_scales, _squared_error(padded, widest, format)
    for factor in shrink_factors(format)[1:]:
        scales = np.maximum(widest * np.float32(factor), floor).astype(full_scales.dtype)
        error = _squared_error(padded, scales, format)
        is_better = error < best_error
        best = np.where(is_better, scales, best)
        best_error = np.where(is_better, error, best_error)
    return best


def _squared_error(padded: np.ndarray, scales: np.ndarray, format: Format) -> np.ndarray:
    """Sum over each group's columns of (q * scale - w)^2: f64 [rows, groups]."""
    scales = scales.astype(np.float32, copy=False)[:, :, None]
    values = np.rint(padded / scales)
    np.clip(values, -format.qmax - 1, format.qmax, out=values)
    values *= scales
    values -= padded
    errors = values.astype(np.float64)
    errors *= errors
    while errors.shape[2] > 1:
        half = errors.shape[2] // 2
        folded = errors[:, :, :half] + errors[:, :, half : 2 * half]
        if errors.shape[2] % 2:
            folded[:, :, 0] += errors[:, :, -1]
        errors = folded
    return errors[:, :, 0]
