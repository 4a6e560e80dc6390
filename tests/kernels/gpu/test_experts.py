import numpy as np
import pytest
from device_arrays import (
    HALF_ULP,
    checked,
    checked_over,
    empty,
    matrix_view,
    narrow,
    random_matrix,
    split,
    unsplit,
    view,
    wide,
)

from glm_gpu.kernels.activation import silu_mul
from glm_gpu.kernels.experts import expert_ffn
from glm_gpu.kernels.gpu.experts import (
    combine,
    expert_hidden,
    expert_output,
    max_tiles,
    mlp_hidden,
    plan_tiles,
    rows_per_tile,
)
from glm_gpu.kernels.gpu.product import BLOCK_M, WIDE_BLOCK_M
from glm_gpu.kernels.matmul import matmul
from glm_gpu.quant import Format, quantize
from glm_gpu.slab import SlabLayout

FORMATS = ("int4_g64", "int4_g128", "int4", "int8", "int2", "bf16", "f32")


def choices(rng, num_rows, num_experts, k):
    return np.array([rng.permutation(num_experts)[:k] for _ in range(num_rows)], np.int32)


def planned(ids, num_experts, block_m=None):
    block_m = block_m or rows_per_tile(*ids.shape, num_experts)
    num_tiles = max_tiles(*ids.shape, num_experts, block_m)
    tile_experts, pairs = empty(num_tiles, "i32"), empty((num_tiles, block_m), "i32")
    scratch = empty((2, ids.size), "i32")
    plan_tiles(checked(), view(ids), num_experts, view(scratch), view(tile_experts), view(pairs))
    return tile_experts, pairs


@pytest.mark.parametrize("block_m", [BLOCK_M, WIDE_BLOCK_M])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "k"), [(1, 16, 4), (3, 13, 3), (17, 64, 8), (40, 2, 2), (33, 7, 1), (200, 5, 4)]
)
def test_plan_holds_every_pair_once_in_order_and_few_tiles(num_rows, num_experts, k, block_m):
    ids = choices(np.random.default_rng(num_rows), num_rows, num_experts, k)
    tile_experts, pairs = planned(ids, num_experts, block_m)
    flat = ids.reshape(-1)
    expected_experts, expected_pairs = [], []
    for expert in range(num_experts):
        mine = np.flatnonzero(flat == expert)
        for start in range(0, len(mine), block_m):
            tile = mine[start : start + block_m]
            expected_experts.append(expert)
            expected_pairs.append([*tile, *[-1] * (block_m - len(tile))])
    used = len(expected_experts)
    np.testing.assert_array_equal(tile_experts[:used], expected_experts)
    np.testing.assert_array_equal(pairs[:used], expected_pairs)
    assert (tile_experts[used:] == -1).all() and (pairs[used:] == -1).all()


def test_all_pairs_of_one_expert_fit_the_planned_tiles():
    ids = np.full((130, 1), 3, np.int32)
    tile_experts, pairs = planned(ids, 256)
    assert tile_experts[:9].tolist() == [3] * 9 and (tile_experts[9:] == -1).all()
    np.testing.assert_array_equal(pairs[pairs >= 0], np.arange(130))


class Layer:
    """Experts in slabs of their own, and what a device needs to run them."""

    def __init__(self, rng, format, num_experts, hidden, width, scale_dtype=np.float32):
        self.layout = SlabLayout(Format.parse(format), hidden, width, scale_dtype)
        self.memory = np.zeros((num_experts, self.layout.aligned_nbytes + 16), np.uint8)
        self.slabs = []
        for row in self.memory:
            slab = row[-row.ctypes.data % 16 :][: self.layout.nbytes]
            self.slabs.append(slab)
            for role, matrix in zip(("gate", "up", "down"), self.layout.views(slab), strict=True):
                weight = rng.standard_normal(self.layout.shape(role)).astype(np.float32)
                made = quantize(weight / np.float32(weight.shape[1] ** 0.5), self.layout.format, scale_dtype)
                matrix.data[...] = made.data
                if made.scales is not None:
                    matrix.scales[...] = made.scales
        self.table = np.array([slab.ctypes.data for slab in self.slabs], np.int64)

    def run(self, x, ids, weights, dtype, tables=None):
        """The routed experts' sum, computed as a layer does; with several tables one after the other."""
        num_rows, k = ids.shape
        launcher = checked_over(self.memory)
        tile_experts, pairs = (view(a) for a in planned(ids, len(self.table)))
        hidden = empty((num_rows * k, self.layout.width), dtype)
        outputs = empty((num_rows * k, self.layout.hidden), "f32")
        for table in [self.table] if tables is None else tables:
            plan = view(table), self.layout, tile_experts, pairs
            expert_hidden(launcher, view(split(x)), k, *plan, view(hidden))
            expert_output(launcher, view(hidden), *plan, view(outputs))
        out = np.zeros((num_rows, self.layout.hidden), np.float32)
        combine(launcher, view(outputs), view(weights), view(out), view(out))
        return out


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "k", "hidden", "width"),
    [(1, 16, 4, 160, 72), (3, 13, 3, 256, 64), (17, 5, 2, 96, 40), (70, 3, 2, 64, 36)],
)
def test_experts_are_the_specified_ones(format, dtype, num_rows, num_experts, k, hidden, width):
    rng = np.random.default_rng(num_rows)
    layer = Layer(rng, format, num_experts, hidden, width)
    x = narrow(rng.standard_normal((num_rows, hidden)).astype(np.float32), dtype)
    ids = choices(rng, num_rows, num_experts, k)
    weights = rng.random((num_rows, k)).astype(np.float32)
    expected = expert_ffn(wide(x), layer.slabs, layer.layout, ids, weights, "f32")
    # the hidden activations are rounded: each output is off by at most that much of the size of its own sum
    assert np.abs(layer.run(x, ids, weights, dtype) - expected).max() <= 2 * HALF_ULP[dtype] * np.abs(expected).max()


def test_scales_may_be_f16():
    rng = np.random.default_rng(1)
    layer = Layer(rng, "int4_g64", 4, 256, 64, np.float16)
    x, ids = narrow(rng.standard_normal((2, 256)).astype(np.float32), "bf16"), choices(rng, 2, 4, 2)
    weights = np.ones((2, 2), np.float32)
    expected = expert_ffn(wide(x), layer.slabs, layer.layout, ids, weights, "f32")
    assert np.abs(layer.run(x, ids, weights, "bf16") - expected).max() <= 2 * HALF_ULP["bf16"] * np.abs(expected).max()


def test_experts_that_arrive_later_give_the_same_bits():
    rng = np.random.default_rng(2)
    layer = Layer(rng, "int4_g64", 9, 160, 72)
    x, ids = narrow(rng.standard_normal((20, 160)).astype(np.float32), "bf16"), choices(rng, 20, 9, 3)
    weights = rng.random((20, 3)).astype(np.float32)
    is_here = np.arange(9) % 2 == 0
    tables = [np.where(is_here, layer.table, 0), np.where(is_here, 0, layer.table)]
    np.testing.assert_array_equal(layer.run(x, ids, weights, "bf16"), layer.run(x, ids, weights, "bf16", tables))


@pytest.mark.parametrize(("num_rows", "num_experts"), [(50, 6), (80, 3)])
def test_a_row_has_the_same_bits_in_every_pass(num_rows, num_experts):
    """In tiles of 16 rows and of 64."""
    rng = np.random.default_rng(3)
    layer = Layer(rng, "int4_g64", num_experts, 160, 72)
    x, ids = (
        narrow(rng.standard_normal((num_rows, 160)).astype(np.float32), "bf16"),
        choices(rng, num_rows, num_experts, 3),
    )
    weights = rng.random((num_rows, 3)).astype(np.float32)
    together = layer.run(x, ids, weights, "bf16")
    for row in (0, 23, num_rows - 1):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(layer.run(x[one], ids[one], weights[one], "bf16")[0], together[row])


def test_weighted_experts_are_added_in_the_order_of_the_choices():
    """1e8 + 1 - 1e8 is 0 in f32, 1e8 - 1e8 + 1 is 1."""
    outputs = np.array([[1e8] * 4, [1.0] * 4, [-1e8] * 4, [1e8] * 4, [-1e8] * 4, [1.0] * 4], np.float32)
    out = np.full((2, 4), 0.25, np.float32)
    combine(checked(), view(outputs), view(np.ones((2, 3), np.float32)), view(out), view(out))
    np.testing.assert_array_equal(out, [[0.25] * 4, [1.25] * 4])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("num_rows", "hidden", "width"), [(1, 160, 272), (17, 96, 40)])
def test_dense_hidden_activations_are_the_specified_ones(format, num_rows, hidden, width):
    rng = np.random.default_rng(width)
    gate, up = (random_matrix(rng, width, hidden, format) for _ in range(2))
    x = narrow(rng.standard_normal((num_rows, hidden)).astype(np.float32) / np.float32(hidden**0.5), "bf16")
    out = empty((num_rows, width), "bf16")
    mlp_hidden(checked(), view(split(x)), matrix_view(gate), matrix_view(up), view(out))
    expected = silu_mul(matmul(wide(x), gate, "f32"), matmul(wide(x), up, "f32"))
    np.testing.assert_allclose(wide(unsplit(out)), expected, rtol=1.01 * HALF_ULP["bf16"], atol=1e-5)
