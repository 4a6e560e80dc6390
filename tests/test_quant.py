"""Packed formats against the oracle's golden bytes, and the contract at awkward sizes."""

import numpy as np
import pytest

from glm_gpu.quant import (
    FORMATS,
    Format,
    QuantizedMatrix,
    bf16_to_f32,
    dequantize,
    f32_to_bf16,
    quantize,
    unpack,
)

PACKED = [format for format in FORMATS.values() if format.is_packed]
SHAPES = [(1, 1), (3, 31), (5, 33), (2, 64), (7, 65), (4, 129), (3, 300)]


@pytest.fixture(scope="module")
def golden(oracle_dir):
    with np.load(oracle_dir / "quant" / "quant_golden.npz") as arrays:
        return dict(arrays)


def random_weight(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def naive_quantize(weight, format, scale_dtype=np.float32):
    """The format's definition, one weight at a time: integers and scales."""
    num_rows, num_columns = weight.shape
    group = format.group or num_columns
    integers = np.zeros(weight.shape, np.int8)
    scales = np.zeros((num_rows, -(-num_columns // group)), scale_dtype)
    for row in range(num_rows):
        for start in range(0, num_columns, group):
            values = weight[row, start : start + group]
            scale = max(np.abs(values).max() / np.float32(format.qmax), np.float32(1e-8))
            if scale_dtype == np.float16:
                scale = max(np.float16(scale), np.float16(2**-24))
            scales[row, start // group] = scale
            for column, value in enumerate(values):
                quotient = np.rint(value / np.float32(scale))
                integers[row, start + column] = min(max(quotient, -format.qmax - 1), format.qmax)
    return integers, scales


def test_formats_count_bytes_and_scales():
    assert [FORMATS[name].row_bytes(7) for name in ("f32", "bf16", "int8", "int4", "int2")] == [28, 14, 7, 4, 2]
    int4_g64 = Format.parse("int4_g64")
    assert [int4_g64.num_groups(n) for n in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]
    assert int4_g64.data_nbytes(10, 65) == 330
    assert int4_g64.scale_count(10, 65) == 20
    assert FORMATS["bf16"].scale_count(10, 65) == 0
    assert [FORMATS[name].qmax for name in ("int8", "int4", "int2")] == [127, 7, 1]


def test_unknown_format_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"'int3'.*int4_g64"):
        Format.parse("int3")


@pytest.mark.parametrize("case", range(7))
@pytest.mark.parametrize(
    ("name", "data_key", "scale_key"),
    [
        ("int4", "int4_packed", "int4_scale"),
        ("int4_g64", "int4g64_packed", "int4g64_scale"),
        ("int8", "int8_q", "int8_scale"),
    ],
)
def test_bytes_and_scales_equal_the_golden_vectors(golden, case, name, data_key, scale_key):
    matrix = quantize(golden[f"c{case}_w"], Format.parse(name))
    np.testing.assert_array_equal(matrix.data, golden[f"c{case}_{data_key}"].view(np.uint8))
    np.testing.assert_array_equal(matrix.scales.ravel(), golden[f"c{case}_{scale_key}"].ravel())


@pytest.mark.parametrize("case", range(7))
@pytest.mark.parametrize(("name", "key"), [("int4", "int4_y"), ("int4_g64", "int4g64_y"), ("int8", "int8_y")])
def test_dequantized_products_equal_the_golden_ones(golden, case, name, key):
    matrix = quantize(golden[f"c{case}_w"], Format.parse(name))
    weight = dequantize(matrix).astype(np.float64)
    x = golden[f"c{case}_x"].astype(np.float64)
    # the golden weights are products of integer and scale in f64, ours are rounded to f32
    bound = np.abs(x) @ np.abs(weight).T * 2.0**-23
    assert (np.abs(x @ weight.T - golden[f"c{case}_{key}"]) <= bound).all()


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_quantize_equals_the_definition(format, shape, scale_dtype):
    weight = random_weight(shape)
    weight[0] = 0
    integers, scales = naive_quantize(weight, format, scale_dtype)
    matrix = quantize(weight, format, scale_dtype)
    np.testing.assert_array_equal(matrix.scales, scales)
    assert matrix.scales.dtype == scale_dtype
    np.testing.assert_array_equal(unpack(matrix), integers)
    group = format.group or shape[1]
    per_weight = np.repeat(scales.astype(np.float32), group, axis=1)[:, : shape[1]]
    np.testing.assert_array_equal(dequantize(matrix), integers.astype(np.float32) * per_weight)


def test_row_blocks_do_not_show_in_the_result():
    weight = random_weight((300, 4096))  # three blocks
    matrix = quantize(weight, FORMATS["int4_g64"])
    for row in (0, 127, 128, 129, 299):
        alone = quantize(weight[row : row + 1], FORMATS["int4_g64"])
        np.testing.assert_array_equal(matrix.data[row], alone.data[0])
        np.testing.assert_array_equal(matrix.scales[row], alone.scales[0])
    np.testing.assert_array_equal(dequantize(matrix)[200:], dequantize(matrix.rows(200, 300)))


def test_int2_lays_four_columns_in_a_byte_lowest_bits_first():
    matrix = quantize(np.float32([[1, -1, 0, 1, -1]]), FORMATS["int2"])
    assert matrix.data.tolist() == [[3 | 1 << 2 | 2 << 4 | 3 << 6, 1 | 2 << 2 | 2 << 4 | 2 << 6]]


def test_int4_fills_the_unused_nibble_with_eight_and_ignores_it_when_reading():
    matrix = quantize(np.float32([[7, -7, 3]]), FORMATS["int4"])
    assert matrix.data.tolist() == [[0x1F, 0x8B]]
    for unused in range(16):
        data = matrix.data.copy()
        data[0, 1] = unused << 4 | 0xB
        assert unpack(QuantizedMatrix(matrix.format, matrix.shape, data, matrix.scales)).tolist() == [[7, -7, 3]]


def test_weights_are_divided_and_not_multiplied_by_a_reciprocal():
    # 0.6787021 / (1.3574042 / 7) is 3.5 in f32 and rounds to 4; times the rounded reciprocal it would be 3.4999998
    assert unpack(quantize(np.float32([[1.3574042, 0.6787021]]), FORMATS["int4"])).tolist() == [[7, 4]]


def test_f16_scale_is_the_divisor():
    weight = np.float32([[1.0, 0.35]])
    matrix = quantize(weight, FORMATS["int8"], np.float16)
    scale = np.float32(matrix.scales[0, 0])
    assert scale != np.float32(1.0) / np.float32(127)
    assert unpack(matrix).tolist() == [[round(1.0 / float(scale)), round(0.35 / float(scale))]]


def test_f16_scale_never_is_zero():
    matrix = quantize(np.zeros((1, 4), np.float32), FORMATS["int8"], np.float16)
    assert matrix.scales[0, 0] == np.float16(2**-24)
    assert not dequantize(matrix).any()


def test_f16_scale_that_was_rounded_down_far_clips_to_the_stored_range():
    largest = np.float32(9.8 * 2.0**-24)  # its scale, 1.4 x 2^-24, becomes 2^-24
    matrix = quantize(np.float32([[-largest, largest]]), FORMATS["int4"], np.float16)
    assert unpack(matrix).tolist() == [[-8, 7]]


def test_scale_too_large_for_f16_is_refused():
    with pytest.raises(ValueError, match=r"scale \[1, 0\].*65504.*float32"):
        quantize(np.float32([[1], [1e7]]), FORMATS["int8"], np.float16)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_weight_that_is_not_finite_is_refused_with_its_index(format, value):
    weight = random_weight((300, 2000))
    weight[299, 1999] = value
    with pytest.raises(ValueError, match=r"weight \[299, 1999\]"):
        quantize(weight, format)


def test_quantize_leaves_its_argument_unchanged():
    weight = random_weight((4, 64))
    before = weight.copy()
    for format in FORMATS.values():
        quantize(weight, format)
    np.testing.assert_array_equal(weight, before)


def test_rows_is_a_view():
    for format in FORMATS.values():
        matrix = quantize(random_weight((6, 70)), format)
        part = matrix.rows(2, 5)
        assert part.shape == (3, 70)
        assert np.shares_memory(part.data, matrix.data)
        np.testing.assert_array_equal(dequantize(part), dequantize(matrix)[2:5])
        assert matrix.nbytes == format.data_nbytes(6, 70) + 4 * format.scale_count(6, 70)


def test_plain_formats_hold_the_numbers_themselves():
    weight = random_weight((3, 5))
    np.testing.assert_array_equal(dequantize(quantize(weight, FORMATS["f32"])), weight)
    bf16 = quantize(weight, FORMATS["bf16"])
    assert bf16.data.dtype == np.uint16
    np.testing.assert_array_equal(dequantize(bf16), bf16_to_f32(f32_to_bf16(weight)))


def test_bf16_equals_the_golden_values(golden):
    np.testing.assert_array_equal(bf16_to_f32(golden["bf16_bits"]), golden["bf16_as_f32"])
    np.testing.assert_array_equal(f32_to_bf16(golden["bf16_as_f32"]), golden["bf16_bits"])


def test_bf16_rounds_ties_to_even_and_keeps_nan():
    bits = np.uint32([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x80000000])
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80]
    result = f32_to_bf16(bits.view(np.float32))
    assert result[:5].tolist() == expected
    assert np.isnan(bf16_to_f32(result[5:7])).all()
    assert result[7] == 0x8000
