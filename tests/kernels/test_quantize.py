import numpy as np
import pytest
from product_weights import IMPLEMENTATIONS, PACKED

from glm_gpu import quant
from glm_gpu.fp8 import dequantize_fp8
from glm_gpu.kernels import cpu
from glm_gpu.kernels.quantize import quantize_rows
from glm_gpu.quant import Format

FORMATS = [Format.parse(name) for name in PACKED]


def assert_same(matrix, expected):
    np.testing.assert_array_equal(matrix.data, expected.data)
    np.testing.assert_array_equal(matrix.scales.view(np.uint8), expected.scales.view(np.uint8))


def weights(rng, columns):
    """Rows of every magnitude: subnormal f16 scales, ties between two integers, zeros, outliers."""
    w = rng.standard_normal((19, columns)).astype(np.float32)
    w[1] *= np.float32(1e-7)
    w[2] = 0
    w[3] = rng.integers(-15, 16, columns) * np.float32(0.5)
    w[4] *= np.float32(1e-30)
    w[5, 0] = 5e4
    w[6] *= np.float32(3e-6)
    return w


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_implementation_writes_the_bytes_of_quantize(compiled, format, scale_dtype):
    rng = np.random.default_rng(1)
    for columns in (1, 31, 33, 64, 129, 400):
        w = weights(rng, columns)
        with cpu.use(compiled):
            assert_same(quantize_rows(w, format, scale_dtype), quant.quantize(w, format, scale_dtype))
            bits = quant.f32_to_bf16(w)
            expected = quant.quantize(quant.bf16_to_f32(bits), format, scale_dtype)
            assert_same(quantize_rows(bits, format, scale_dtype), expected)


@pytest.mark.parametrize("compiled", cpu.available())
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_fp8_codes_are_decoded_with_their_blocks(compiled, format):
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 127, (37, 150), dtype=np.uint8) | rng.integers(0, 2, (37, 150), dtype=np.uint8) << 7
    scales = rng.random((3, 3)).astype(np.float32)
    expected = quant.quantize(dequantize_fp8(codes, scales, (16, 64)), format)
    with cpu.use(compiled):
        rows = (np.arange(37) // 16).astype(np.int32)
        assert_same(quantize_rows(codes, format, fp8_scales=scales, scale_rows=rows, columns_per_scale=64), expected)


@pytest.mark.parametrize("compiled", cpu.available())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(compiled, bad):
    w = np.zeros((9, 100), np.float32)
    w[7, 70] = bad
    with cpu.use(compiled), pytest.raises(ValueError, match=r"weight \[7, 70\]"):
        quantize_rows(w, Format.parse("int4_g64"))


@pytest.mark.parametrize("compiled", cpu.available())
def test_a_scale_beyond_float16_is_named(compiled):
    w = np.full((2, 64), 1e9, np.float32)
    with cpu.use(compiled), pytest.raises(ValueError, match="float16"):
        quantize_rows(w, Format.parse("int8"), np.float16)


@pytest.mark.skipif(not IMPLEMENTATIONS, reason="the C extension is not built")
def test_bad_arguments_raise():
    data, packed = np.zeros((2, 64), np.uint8), np.zeros((2, 32), np.uint8)
    scales, table = np.zeros((2, 1), np.float32), np.zeros(256, np.float32)
    blocks, rows = np.ones((1, 1), np.float32), np.zeros(2, np.int32)
    call = cpu.active.quantize_rows
    assert call(data, 4, 64, packed, scales, table, blocks, rows, 64)
    for arguments in (
        (data, 3, 64, packed, scales, table, blocks, rows, 64),
        (data, 4, 32, packed, scales, table, blocks, rows, 64),
        (data, 8, 64, packed, scales, table, blocks, rows, 64),
        (data, 4, 64, packed, scales[:1], table, blocks, rows, 64),
        (data, 4, 64, packed, scales, table[:255], blocks, rows, 64),
        (data, 4, 64, packed, scales, table, blocks, rows + np.int32(1), 64),
        (data, 4, 64, packed, scales, table, blocks, rows, 32),
        (data, 4, 64, packed, scales, table, blocks, rows, 0),
    ):
        with pytest.raises(ValueError):
            call(*arguments)
