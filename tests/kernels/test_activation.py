import math

import numpy as np
import pytest

from glm_gpu.kernels.activation import exp, sigmoid, silu_mul

pytestmark = pytest.mark.usefixtures("implementation")

SIZES = [1, 3, 15, 16, 17, 31, 33, 63, 576]


def test_exp_is_within_one_ten_millionth():
    x = np.linspace(-87.33, 88.37, 200_001).astype(np.float32)
    relative = exp(x).astype(np.float64) / np.array([math.exp(v) for v in x.tolist()]) - 1
    assert np.abs(relative).max() < 1e-7


def test_exp_at_its_ends():
    x = np.array([0.0, -0.0, -87.34, -1e30, -np.inf, 88.4, np.inf, np.nan], dtype=np.float32)
    y = exp(x)
    assert y[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert np.isfinite(y[5:7]).all() and y[5] == y[6] > 2.4e38
    assert np.isnan(y[7])


@pytest.mark.parametrize("size", SIZES)
def test_a_value_has_the_same_bits_wherever_it_stands(size):
    rng = np.random.default_rng(size)
    x, up = rng.standard_normal((2, size)).astype(np.float32) * np.float32(20)
    exps, products = exp(x), silu_mul(x, up)
    for k in range(size):
        np.testing.assert_array_equal(exps[k : k + 1], exp(x[k : k + 1]))
        np.testing.assert_array_equal(products[k : k + 1], silu_mul(x[k : k + 1], up[k : k + 1]))


@pytest.mark.parametrize("num_rows", [1, 3, 17, 63])
def test_silu_mul_is_close_to_its_definition(num_rows):
    rng = np.random.default_rng(num_rows)
    gate, up = rng.standard_normal((2, num_rows, 33)).astype(np.float32) * np.float32(10)
    expected = [[u * g / (1 + math.exp(-g)) for g, u in zip(*rows, strict=True)] for rows in zip(gate, up, strict=True)]
    np.testing.assert_allclose(silu_mul(gate, up), expected, rtol=5e-7)


def test_sigmoid_is_close_to_its_definition():
    x = np.linspace(-80, 80, 4001).astype(np.float32)
    np.testing.assert_allclose(sigmoid(x), [1 / (1 + math.exp(-v)) for v in x.tolist()], rtol=3e-7)
    assert sigmoid(np.array([-200, 200], dtype=np.float32)).tolist() == [pytest.approx(0, abs=1e-38), 1.0]


@pytest.mark.parametrize("size", [*SIZES, 4096, 12_289])
def test_silu_mul_has_the_same_bits_everywhere(size, same_bits):
    rng = np.random.default_rng(size)
    gate, up = rng.standard_normal((2, size)).astype(np.float32) * np.float32(30)
    same_bits(lambda: silu_mul(gate, up))
