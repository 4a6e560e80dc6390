import math

import numpy as np
import pytest

from glm_gpu.kernels.norm import layer_norm, rms_norm

pytestmark = pytest.mark.usefixtures("implementation")

WIDTHS = [1, 15, 17, 31, 33, 56, 68, 128, 576, 6144]
ROWS = [1, 3, 17, 63]


def case(num_rows, width):
    rng = np.random.default_rng(width)
    x = rng.standard_normal((num_rows, width)).astype(np.float32) * np.float32(3) + np.float32(0.5)
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    return x, weight, bias


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_divides_by_the_root_mean_square(width):
    x, weight, _ = case(3, width)
    for row, got in zip(x.tolist(), rms_norm(x, weight, 1e-5), strict=True):
        root = math.sqrt(math.fsum(v * v for v in row) / width + 1e-5)
        np.testing.assert_allclose(got, [v / root * w for v, w in zip(row, weight.tolist(), strict=True)], rtol=1.5e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_centres_and_divides_by_the_deviation(width):
    x, weight, bias = case(3, width)
    for row, got in zip(x.tolist(), layer_norm(x, weight, bias, 1e-6), strict=True):
        mean = math.fsum(row) / width
        root = math.sqrt(math.fsum((v - mean) ** 2 for v in row) / width + 1e-6)
        scaled = [(v - mean) / root * w for v, w in zip(row, weight.tolist(), strict=True)]
        expected = [s + b for s, b in zip(scaled, bias.tolist(), strict=True)]
        np.testing.assert_allclose(got, expected, rtol=2e-7, atol=2e-7 * max(map(abs, scaled)))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [31, 68, 576])
def test_a_row_has_the_same_bits_alone(num_rows, width):
    x, weight, bias = case(num_rows, width)
    rms, layer = rms_norm(x, weight, 1e-5), layer_norm(x, weight, bias, 1e-6)
    for t in range(num_rows):
        np.testing.assert_array_equal(rms[t : t + 1], rms_norm(x[t : t + 1], weight, 1e-5))
        np.testing.assert_array_equal(layer[t : t + 1], layer_norm(x[t : t + 1], weight, bias, 1e-6))


def test_a_slice_of_a_wider_array_has_the_same_bits():
    x, weight, bias = case(5, 96)
    part, w, b = x[:, :56], weight[:56], bias[:56]
    np.testing.assert_array_equal(rms_norm(part, w, 1e-5), rms_norm(part.copy(), w, 1e-5))
    np.testing.assert_array_equal(layer_norm(part, w, b, 1e-6), layer_norm(part.copy(), w, b, 1e-6))


def test_the_input_is_left_alone():
    x, weight, bias = case(2, 33)
    before = x.copy()
    rms_norm(x, weight, 1e-5)
    layer_norm(x, weight, bias, 1e-6)
    np.testing.assert_array_equal(x, before)


def test_zeros_stay_zero_and_large_values_do_not_overflow():
    weight = np.ones(4, dtype=np.float32)
    assert rms_norm(np.zeros((1, 4), dtype=np.float32), weight, 1e-5).tolist() == [[0, 0, 0, 0]]
    # The square of 3e30 exceeds f32.
    assert rms_norm(np.full((1, 4), 3e30, dtype=np.float32), weight, 1e-5).tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_have_the_same_bits_everywhere(num_rows, width, same_bits):
    x, weight, bias = case(num_rows, width)
    same_bits(lambda: rms_norm(x, weight, 1e-5))
    same_bits(lambda: layer_norm(x, weight, bias, 1e-6))
