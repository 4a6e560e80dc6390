"""Weights of a checkpoint into packed rows, at the speed of the machine: what the converter spends its time on."""

import numpy as np

from glm_gpu import quant
from glm_gpu.fp8 import E4M3
from glm_gpu.kernels import cpu
from glm_gpu.quant import Format, QuantizedMatrix


def quantize_rows(
    weight: np.ndarray,
    format: Format,
    scale_dtype=np.float32,
    fp8_scales: np.ndarray | None = None,
    scale_rows: np.ndarray | None = None,
    columns_per_scale: int = 0,
) -> QuantizedMatrix:
    """glm_gpu.quant.quantize of rows in their source form, bit for bit.

    Args:
        weight: [O, I] f32, uint16 (bf16 bit patterns), or uint8 (FP8 e4m3 codes).
        format: a packed format.
        scale_dtype: float32 or float16, of the result.
        fp8_scales: for codes: [n, ceil(I / columns_per_scale)] f32; a weight is its code's value times its scale.
        scale_rows: for codes: [O] int32, the row of fp8_scales that each row of codes takes.
        columns_per_scale: for codes.

    Raises:
        ValueError: a weight is not finite, or a scale is too large for float16; the message holds the index.
    """
    assert format.is_packed, format.name
    assert (weight.dtype == np.uint8) == (fp8_scales is not None), weight.dtype
    if cpu.active and weight.size:
        data = np.empty((len(weight), format.row_bytes(weight.shape[1])), np.uint8)
        scales = np.empty((len(weight), format.num_groups(weight.shape[1])), scale_dtype)
        source = None if fp8_scales is None else E4M3, fp8_scales, scale_rows, columns_per_scale
        if cpu.active.quantize_rows(
            np.ascontiguousarray(weight), format.bits, format.group or 0, data, scales, *source
        ):
            return QuantizedMatrix(format, weight.shape, data, scales)
        # NumPy finds the place and the words for what is wrong
    return quant.quantize(_as_f32(weight, fp8_scales, scale_rows, columns_per_scale), format, scale_dtype)


def _as_f32(weight, fp8_scales, scale_rows, columns_per_scale):
    if weight.dtype == np.uint16:
        return quant.bf16_to_f32(weight)
    if weight.dtype == np.uint8:
        return E4M3[weight] * np.repeat(fp8_scales[scale_rows], columns_per_scale, axis=1)[:, : weight.shape[1]]
    return weight
