import numpy as np
import pytest
from device_arrays import HALF_ULP, Caches, checked_over, empty, narrow, unsplit, view, wide

from glm_gpu.kernels.attention import attend_explicit
from glm_gpu.kernels.attention import attend_latent as attend_latent_specified
from glm_gpu.kernels.gpu.attention import CHUNK, attend_heads, attend_latent, parts_shape

SCALE = 0.125


class Latent:
    """Rows of a pass with a cache each, and what they attend to."""

    def __init__(self, seed, counts, heads, rank, rest, dtype, top_k=None, offset=64):
        rng = np.random.default_rng(seed)
        self.counts = np.array(counts, np.int32)
        self.rank, self.dtype, self.offset = rank, dtype, offset
        num_rows = len(counts)
        self.q = narrow(rng.standard_normal((num_rows, heads, rank + rest)).astype(np.float32), dtype)
        self.caches = Caches.of(rng, [count + 3 for count in counts], rank + rest, dtype, offset)
        self.rows = None
        if top_k:
            self.rows = np.full((num_rows, top_k), -1, np.int32)
            for row, count in enumerate(counts):
                chosen = np.sort(rng.permutation(count)[:top_k])
                self.rows[row, : len(chosen)] = chosen
            self.counts = np.minimum(self.counts, top_k)

    def run(self, pick=slice(None), slice_rows=None, spare=0):
        q, counts = self.q[pick], self.counts[pick]
        num_rows, heads, _ = q.shape
        parts = empty(parts_shape(slice_rows or num_rows, heads, int(counts.max()) + spare, self.rank), "f32")
        out = empty((num_rows, heads, self.rank), self.dtype)
        where = view(self.caches.addresses[pick]), self.offset, self.dtype
        rows = None if self.rows is None else view(self.rows[pick])
        launcher = checked_over(*self.caches.arrays)
        attend_latent(launcher, view(q), *where, rows, view(counts), SCALE, view(parts), view(out))
        return out

    def expected(self):
        results = []
        for row in range(len(self.q)):
            cache = wide(self.caches.rows(row, self.q.shape[2], self.dtype, self.offset))
            rows = None if self.rows is None else self.rows[row : row + 1]
            q = wide(self.q[row : row + 1])
            results.append(attend_latent_specified(q, cache, self.rank, rows, self.counts[row : row + 1], SCALE)[0])
        return np.array(results)


def assert_close(out, expected, dtype):
    # weights and the result are rounded; cached values are normal, so sums of weighted ones stay below 5
    assert np.abs(wide(out) - expected).max() <= 3 * HALF_ULP[dtype] * max(1, np.abs(expected).max())


SHAPES = [([1], 6, 56, 12), ([3, 40, 33], 8, 64, 16), ([CHUNK + 1, CHUNK, 2 * CHUNK + 100], 20, 32, 8)]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("counts", "heads", "rank", "rest"), SHAPES)
def test_latent_attention_is_the_specified_one(counts, heads, rank, rest, dtype):
    case = Latent(rank, counts, heads, rank, rest, dtype)
    assert_close(unsplit(case.run()), case.expected(), dtype)


@pytest.mark.parametrize(("counts", "heads", "rank", "rest"), SHAPES)
def test_sparse_latent_attention_is_the_specified_one(counts, heads, rank, rest):
    case = Latent(rank, counts, heads, rank, rest, "bf16", top_k=270)
    assert_close(unsplit(case.run()), case.expected(), "bf16")


def test_long_rows_of_17_tokens_are_the_specified_ones():
    case = Latent(7, range(100, 117), 16, 32, 16, "bf16", top_k=90)
    assert_close(unsplit(case.run()), case.expected(), "bf16")


@pytest.mark.parametrize("top_k", [None, 270])
def test_a_row_has_the_same_bits_in_every_pass(top_k):
    """Alone or together, in one go or in slices, with room for more positions or none."""
    case = Latent(1, [5, CHUNK + 44, 2, CHUNK, 31], 8, 64, 16, "bf16", top_k)
    together = case.run()
    np.testing.assert_array_equal(case.run(slice_rows=2), together)
    np.testing.assert_array_equal(case.run(spare=3 * CHUNK), together)
    for row in range(5):
        np.testing.assert_array_equal(case.run(slice(row, row + 1))[0], together[row])


def test_rows_that_attend_to_the_same_positions_sparsely_and_densely_agree():
    case = Latent(2, [300], 8, 64, 16, "bf16")
    dense = case.run()
    case.rows = np.arange(300, dtype=np.int32)[None]
    np.testing.assert_array_equal(case.run(), dense)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("counts", "heads", "kv_heads", "width"), [([1], 6, 6, 16), ([20, 300], 8, 2, 24)])
def test_attention_with_heads_is_the_specified_one(counts, heads, kv_heads, width, dtype):
    rng = np.random.default_rng(width)
    counts = np.array(counts, np.int32)
    q = narrow(rng.standard_normal((len(counts), heads, width)).astype(np.float32), dtype)
    row_width = kv_heads * width
    # keys of all positions, then values of all positions
    caches = Caches.of(rng, 2 * counts, row_width, dtype)
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        parts = empty(parts_shape(1, heads, count, width), "f32")
        out = empty((1, heads, width), dtype)
        value_offset = int(count) * row_width * 2
        where = view(caches.addresses[one]), 0, value_offset, kv_heads, dtype, view(counts[one])
        attend_heads(checked_over(*caches.arrays), view(q[one]), *where, SCALE, view(parts), view(out))
        keys, values = wide(caches.rows(row, width, dtype)).reshape(2, count, kv_heads, width)
        expected = attend_explicit(wide(q[one]), keys, values, None, counts[one], np.float32(SCALE))
        assert_close(unsplit(out.reshape(1, -1)).reshape(out.shape), expected, dtype)
