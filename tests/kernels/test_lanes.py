import numpy as np
import pytest

from glm_gpu.kernels.lanes import dot, dot_rows, lane_sum, widen

F32 = np.float32


def spelled_dot(a, b, scales=None):
    """The stated order, one scalar at a time."""
    padded = -(-len(a) // 64) * 64
    a = [*a, *[F32(0)] * (padded - len(a))]
    b = [*b, *[F32(0)] * (padded - len(b))]
    acc = F32(0)
    for g in range(padded // 64):
        lanes = []
        for lane in range(16):
            p0, p1, p2, p3 = (a[64 * g + 16 * i + lane] * b[64 * g + 16 * i + lane] for i in range(4))
            lanes.append(((p0 + p1) + p2) + p3)
        for half in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        acc = acc + (lanes[0] if scales is None else lanes[0] * scales[g])
    return acc


@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 33, 56, 63, 64, 65, 68, 127, 129, 576])
@pytest.mark.parametrize("scaled", [False, True])
def test_dot_adds_in_the_stated_order(width, scaled):
    rng = np.random.default_rng(width)
    x = rng.standard_normal((3, width)).astype(F32)
    w = rng.standard_normal((5, width)).astype(F32)
    scales = rng.standard_normal((5, -(-width // 64))).astype(F32) if scaled else None
    expected = [[spelled_dot(a, b, None if scales is None else scales[o]) for o, b in enumerate(w)] for a in x]
    np.testing.assert_array_equal(dot_rows(x, w, scales), np.array(expected, dtype=F32))


@pytest.mark.parametrize("num_rows", [1, 3, 17, 63])
@pytest.mark.parametrize("num_columns", [1, 33, 1100])
def test_a_row_has_the_same_bits_alone(num_rows, num_columns):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, 68)).astype(F32)
    w = rng.standard_normal((num_columns, 68)).astype(F32)
    together = dot_rows(x, w)
    for t in range(num_rows):
        np.testing.assert_array_equal(together[t : t + 1], dot_rows(x[t : t + 1], w))


def test_memory_layout_does_not_change_bits():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 97)).astype(F32)
    w = rng.standard_normal((7, 97)).astype(F32)
    np.testing.assert_array_equal(dot_rows(np.asfortranarray(x), np.asfortranarray(w)), dot_rows(x, w))
    np.testing.assert_array_equal(lane_sum(np.asfortranarray(x)), lane_sum(x))


def test_zero_products_give_positive_zero():
    zeros = np.zeros(5, dtype=F32)
    assert not np.signbit(dot(-zeros, zeros))
    assert not np.signbit(lane_sum(-zeros))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 576])
def test_lane_sum_adds_in_the_stated_order(n, dtype):
    a = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
    for row, got in zip(a, lane_sum(a), strict=True):
        lanes = [dtype(0)] * 16
        for k, value in enumerate(row):
            lanes[k % 16] = lanes[k % 16] + value
        for half in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        assert got == lanes[0]


def test_widen_reads_bfloat16_patterns():
    patterns = np.array([0x3F80, 0xC040, 0x0001, 0x7F7F], dtype=np.uint16)
    assert widen(patterns).tolist() == [1.0, -3.0, 2.0**-133, (2 - 2**-7) * 2.0**127]
