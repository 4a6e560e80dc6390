import cmath

import numpy as np
import pytest

from glm_gpu.kernels.rope import rope_half, rope_interleaved, rope_tables

pytestmark = pytest.mark.usefixtures("implementation")

POSITIONS = np.array([0, 1, 2, 77, 4095, 99_999, 1_048_575])


def rotated(pair, position, j, theta, dim):
    return complex(*pair) * cmath.exp(1j * position * theta ** (-2 * j / dim))


@pytest.mark.parametrize("dim", [2, 8, 24, 64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_interleaved_rotates_neighbours(dim, shape):
    x = np.random.default_rng(dim).standard_normal((len(POSITIONS), *shape, dim)).astype(np.float32)
    y = rope_interleaved(x, *rope_tables(POSITIONS, 8e6, dim))
    for index in np.ndindex(x.shape[:-1]):
        for j in range(dim // 2):
            expected = rotated(x[index][2 * j : 2 * j + 2], int(POSITIONS[index[0]]), j, 8e6, dim)
            assert complex(*y[index][2 * j : 2 * j + 2]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dim", [2, 8, 24, 128])
def test_half_rotates_members_half_a_head_apart(dim):
    x = np.random.default_rng(dim).standard_normal((len(POSITIONS), 3, dim)).astype(np.float32)
    y = rope_half(x, *rope_tables(POSITIONS, 1e4, dim))
    for index in np.ndindex(x.shape[:-1]):
        for j in range(dim // 2):
            expected = rotated(x[index][[j, j + dim // 2]], int(POSITIONS[index[0]]), j, 1e4, dim)
            assert complex(*y[index][[j, j + dim // 2]]) == pytest.approx(expected, abs=1e-6)


def test_position_zero_changes_nothing():
    x = np.random.default_rng(0).standard_normal((1, 4, 64)).astype(np.float32)
    tables = rope_tables([0], 8e6, 64)
    np.testing.assert_array_equal(rope_interleaved(x, *tables), x)
    np.testing.assert_array_equal(rope_half(x, *tables), x)


def test_angles_are_exact_a_million_positions_in():
    cos, sin = rope_tables([1_000_000], 8e6, 64)
    expected = cmath.exp(1j * 1_000_000 * 8e6 ** (-2 / 64))
    # An angle rounded to f32 would be off by up to 0.03 here.
    assert complex(cos[0, 1], sin[0, 1]) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 63])
def test_a_row_has_the_same_bits_alone(num_rows):
    rng = np.random.default_rng(num_rows)
    positions = rng.integers(0, 1_000_000, num_rows)
    x = rng.standard_normal((num_rows, 2, 24)).astype(np.float32)
    cos, sin = rope_tables(positions, 8e6, 24)
    for t in range(num_rows):
        one = slice(t, t + 1)
        alone = rope_tables(positions[one], 8e6, 24)
        np.testing.assert_array_equal(alone, (cos[one], sin[one]))
        np.testing.assert_array_equal(rope_interleaved(x, cos, sin)[one], rope_interleaved(x[one], *alone))
        np.testing.assert_array_equal(rope_half(x, cos, sin)[one], rope_half(x[one], *alone))


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dim", [2, 6, 24, 64, 70])
def test_rotations_have_the_same_bits_everywhere(num_rows, shape, dim, same_bits):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((num_rows, *shape, dim + 8)).astype(np.float32)[..., 8:]
    cos, sin = rope_tables(rng.integers(0, 1_000_000, num_rows), 8e6, dim)
    same_bits(lambda: rope_interleaved(x, cos, sin))
    same_bits(lambda: rope_half(x, cos, sin))
