import numpy as np
import pytest
from device_arrays import checked, empty, view

from glm_gpu.kernels.gpu.router import num_parts, project_f32, route
from glm_gpu.kernels.lanes import dot_rows
from glm_gpu.kernels.router import route as route_specified
from glm_gpu.kernels.router import route_softmax


def routed(x, gate, bias, experts_per_tok, n_group=1, topk_group=1, norm=True, scale=2.5):
    num_rows, width = x.shape
    parts = empty((num_parts(width), num_rows, len(gate)), "f32")
    ids, weights = empty((num_rows, experts_per_tok), "i32"), empty((num_rows, experts_per_tok), "f32")
    bias = None if bias is None else view(bias)
    groups = n_group, topk_group, norm, scale
    route(checked(), view(x), view(gate), bias, *groups, view(parts), view(ids), view(weights))
    return ids, weights


def case(seed, num_rows, width, num_experts):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    gate = rng.standard_normal((num_experts, width)).astype(np.float32) / np.float32(width**0.5)
    return x, gate, rng.standard_normal(num_experts).astype(np.float32)


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "width"), [(1, 16, 160), (3, 5, 132), (17, 32, 1540), (2, 33, 6144)]
)
def test_f32_product_is_the_specified_one(num_rows, num_outputs, width):
    x, w, _ = case(width, num_rows, width, num_outputs)
    parts, out = empty((num_parts(width), num_rows, num_outputs), "f32"), empty((num_rows, num_outputs), "f32")
    project_f32(checked(), view(x), view(w), view(parts), view(out))
    np.testing.assert_allclose(out, dot_rows(x, w), atol=width * 2.0**-24)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("num_rows", "num_experts", "k"), [(1, 16, 4), (3, 13, 3), (17, 64, 8), (1, 5, 5)])
def test_sigmoid_choice_is_the_specified_one(num_rows, num_experts, k, norm):
    x, gate, bias = case(num_experts, num_rows, 160, num_experts)
    ids, weights = routed(x, gate, bias, k, norm=norm)
    expected_ids, expected_weights = route_specified(x, gate, bias, k, 1, 1, norm, 2.5)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


@pytest.mark.parametrize(("n_group", "topk_group"), [(4, 2), (8, 3), (2, 1)])
def test_grouped_choice_is_the_specified_one(n_group, topk_group):
    x, gate, bias = case(n_group, 5, 160, 32)
    ids, weights = routed(x, gate, bias, 4, n_group, topk_group)
    expected_ids, expected_weights = route_specified(x, gate, bias, 4, n_group, topk_group, True, 2.5)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_softmax_choice_is_the_specified_one(norm):
    x, gate, _ = case(3, 7, 96, 12)
    ids, weights = routed(x, gate, None, 3, norm=norm)
    expected_ids, expected_weights = route_softmax(x, gate, 3, norm)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


def test_ties_go_to_the_lowest_expert():
    x, gate = np.zeros((2, 64), np.float32), np.zeros((12, 64), np.float32)
    bias = np.zeros(12, np.float32)
    bias[[3, 9]] = 1
    ids, _ = routed(x, gate, bias, 5)
    np.testing.assert_array_equal(ids, [[3, 9, 0, 1, 2]] * 2)


def test_ids_are_valid_and_distinct_whatever_the_logits():
    """A NaN must not become an address: ids index a table of experts."""
    x, gate, bias = case(0, 4, 64, 9)
    x[0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    ids, _ = routed(x, gate, bias, 6)
    for row in ids:
        assert len(set(row.tolist())) == 6 and row.min() >= 0 and row.max() < 9, row


def test_a_row_has_the_same_bits_in_every_pass():
    x, gate, bias = case(5, 18, 1600, 40)
    ids, weights = routed(x, gate, bias, 4)
    for row in (0, 9, 17):
        ids_alone, weights_alone = routed(x[row : row + 1], gate, bias, 4)
        np.testing.assert_array_equal(ids_alone[0], ids[row])
        np.testing.assert_array_equal(weights_alone[0], weights[row])
