"""Weights and activations at awkward sizes, for the tests of every product."""

import numpy as np

from glm_gpu import quant
from glm_gpu.kernels import cpu

IMPLEMENTATIONS = [name for name in cpu.available() if name != "numpy"]
PACKED = [name for name, format in quant.FORMATS.items() if format.is_packed]


def unaligned(array):
    """The same values at an odd address, as in a slab or a mapped shard."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def random_matrix(rng, format_name, num_rows, num_columns, scale_dtype=np.float32):
    """Every stored integer occurs, -128, -8 and -2 and unused fields included; some rows huge, tiny, or zero."""
    format = quant.Format.parse(format_name)
    if not format.is_packed:
        plain = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
        plain[::5] *= np.float32(1e15)
        return quant.QuantizedMatrix(
            format, (num_rows, num_columns), unaligned(plain if format_name == "f32" else quant.f32_to_bf16(plain))
        )
    data = rng.integers(0, 256, (num_rows, format.row_bytes(num_columns)), dtype=np.uint8)
    scales = np.abs(rng.standard_normal((num_rows, format.num_groups(num_columns)))).astype(scale_dtype)
    scales[1::7] = 1e-7  # subnormal in f16
    scales[2::7] = 0
    scales[3::7] = 60000
    data[4::7] = 0  # the most negative integers of int4 and int2
    data[5::7] = 128  # -128 in int8
    return quant.QuantizedMatrix(format, (num_rows, num_columns), unaligned(data), unaligned(scales))


def random_activations(rng, *shape):
    """Ordinary rows with outliers, a row of zeros, and groups below the smallest magnitude that counts."""
    x = rng.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1, shape[-1])
    flat[:, ::37] *= np.float32(100)
    flat[1::4] = 0
    flat[2::4, :64] = 1e-32
    flat[2::4, 64:65] = np.float32(1e15)
    flat[3::4, 0] = -np.abs(flat[3::4]).max(initial=1.0) * np.float32(2)
    return x
