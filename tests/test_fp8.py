"""FP8 decoding against the oracle's table and a loop that applies scales one weight at a time."""

import numpy as np
import pytest

from glm_gpu.fp8 import E4M3, dequantize_fp8, has_known_scale_shape


@pytest.fixture(scope="module")
def golden(oracle_dir):
    with np.load(oracle_dir / "quant" / "quant_golden.npz") as arrays:
        return dict(arrays)


def random_codes(shape, seed=0):
    codes = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 0  # no NaN
    return codes


def test_table_equals_the_golden_one(golden):
    np.testing.assert_array_equal(E4M3, golden["fp8_e4m3_table"])


def test_golden_matrix_is_dequantized_exactly(golden):
    result = dequantize_fp8(golden["fp8_bytes"], golden["fp8_scale_inv"], (128, 128))
    np.testing.assert_array_equal(result, golden["fp8_dequant"])


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((130, 257), (128, 128)),
        ((576, 192), (128, 128)),
        ((1, 1), (128, 128)),
        ((5, 7), (2, 3)),
        ((700, 900), (64, 32)),
    ],
)
def test_partial_blocks_equal_the_naive_loop(shape, block):
    codes = random_codes(shape)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scales = np.random.default_rng(1).standard_normal(grid).astype(np.float32)
    expected = np.full(shape, np.nan, np.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            expected[row, column] = E4M3[codes[row, column]] * scales[row // block[0], column // block[1]]
    np.testing.assert_array_equal(dequantize_fp8(codes, scales, block), expected)


@pytest.mark.parametrize("scale_shape", [(300,), (300, 1)])
def test_one_scale_a_row(scale_shape):
    codes = random_codes((300, 70))
    scales = np.random.default_rng(1).standard_normal(scale_shape).astype(np.float32)
    expected = E4M3[codes] * scales.reshape(300, 1)
    np.testing.assert_array_equal(dequantize_fp8(codes, scales, (128, 128)), expected)


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_one_scale_for_all(scale_shape):
    codes = random_codes((300, 200))
    scales = np.full(scale_shape, 0.37, np.float32)
    np.testing.assert_array_equal(dequantize_fp8(codes, scales, (128, 128)), E4M3[codes] * np.float32(0.37))


@pytest.mark.parametrize("scale_shape", [(2,), (3, 3), (2, 2), (257,), (1, 257), (130, 3), (2, 3, 1), (0,)])
def test_other_scale_shapes_are_not_known(scale_shape):
    assert not has_known_scale_shape((130, 257), scale_shape, (128, 128))
    assert has_known_scale_shape((130, 257), (2, 3), (128, 128))
