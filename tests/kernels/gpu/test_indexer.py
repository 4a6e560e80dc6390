import numpy as np
import pytest
from device_arrays import Caches, checked, checked_over, empty, narrow, view, wide

from glm_gpu.kernels.gpu.indexer import index_scores, select_top
from glm_gpu.kernels.indexer import index_scores as index_scores_specified
from glm_gpu.kernels.indexer import select_top as select_top_specified


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("heads", "width", "counts"), [(8, 32, [1]), (5, 24, [65, 3, 64]), (32, 128, [200] * 17)])
def test_scores_are_the_specified_ones(heads, width, counts, dtype):
    rng = np.random.default_rng(width)
    counts = np.array(counts, np.int32)
    num_rows, longest, offset = len(counts), int(counts.max()), 32
    q = narrow(rng.standard_normal((num_rows, heads, width)).astype(np.float32), dtype)
    weights = rng.standard_normal((num_rows, heads)).astype(np.float32)
    caches = Caches.of(rng, counts, width, dtype, offset)
    scores = empty((num_rows, longest + 5), "f32")
    where = view(caches.addresses), offset, dtype, view(counts)
    index_scores(checked_over(*caches.arrays), view(q), view(weights), *where, 0.25, 0.5, view(scores))
    for row, count in enumerate(counts):
        keys = wide(caches.rows(row, width, dtype, offset))
        expected = index_scores_specified(
            wide(q[row : row + 1]), weights[row : row + 1] * np.float32(0.5), keys, [count], np.float32(0.25)
        )
        size = np.abs(weights[row]) @ (np.abs(wide(q[row])) @ np.abs(keys).T)
        assert (np.abs(scores[row, :count] - expected[0]) <= 2.0**-18 * size).all()
        assert np.isnan(scores[row, count:]).all()


def chosen(scores, counts, top_k):
    rows, num = empty((len(scores), top_k), "i32"), empty(len(scores), "i32")
    select_top(checked(), view(scores), view(counts), view(rows), view(num))
    return rows, num


@pytest.mark.parametrize("top_k", [1, 16, 100, 2048])
@pytest.mark.parametrize("kind", ["distinct", "few values", "all equal", "zeros of both signs", "tiny and huge"])
def test_choice_is_the_specified_one_exactly(kind, top_k):
    rng = np.random.default_rng(top_k)
    counts = np.array([1, 17, 1024, 1025, 3000], np.int32)
    scores = rng.standard_normal((5, 3000)).astype(np.float32)
    if kind == "few values":
        scores = np.round(scores)
    elif kind == "all equal":
        scores[...] = -1.5
    elif kind == "zeros of both signs":
        scores = np.where(scores > 0, np.float32(0), np.float32(-0.0))
    elif kind == "tiny and huge":
        scores *= np.float32(10) ** rng.integers(-44, 38, scores.shape).astype(np.float32)
    rows, num = chosen(scores, counts, top_k)
    expected_rows, expected_num = select_top_specified(scores, counts, top_k)
    np.testing.assert_array_equal(num, expected_num)
    np.testing.assert_array_equal(rows[:, : expected_rows.shape[1]], expected_rows)
    assert (rows[:, expected_rows.shape[1] :] == -1).all()


def test_scores_behind_the_count_are_never_read():
    scores = np.full((1, 64), np.inf, np.float32)
    scores[0, :9] = -np.arange(9)
    rows, num = chosen(scores, np.array([9], np.int32), 4)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 3]])
    assert num == 4
