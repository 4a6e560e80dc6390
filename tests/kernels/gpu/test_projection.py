import numpy as np
import pytest
from device_arrays import HALF_ULP, checked, empty, matrix_view, narrow, random_matrix, split, unsplit, view, wide

from glm_gpu.kernels.absorb import absorb_query as absorb_query_specified
from glm_gpu.kernels.absorb import expand_value as expand_value_specified
from glm_gpu.kernels.gpu.experts import combine
from glm_gpu.kernels.gpu.projection import absorb_query, embed, expand_value, project, project_both, project_onto
from glm_gpu.kernels.matmul import matmul
from glm_gpu.kernels.rope import rope_interleaved, rope_tables
from glm_gpu.quant import dequantize

FORMATS = ("int4_g64", "int4_g128", "int4", "int8", "int2", "bf16", "f32")
# f32 sums of at most 512 products, in another order than the specification's
SUM_ERROR = 512 * 2.0**-24


def error_bound(x, w):
    """How far two f32 sums of the same products may lie apart."""
    return SUM_ERROR * (np.abs(x).astype(np.float64) @ np.abs(dequantize(w)).astype(np.float64).T)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "width"), [(1, 64, 256), (3, 72, 160), (17, 33, 512), (16, 130, 132)]
)
def test_product_is_the_specified_one(format, dtype, num_rows, num_outputs, width):
    rng = np.random.default_rng(width)
    w = random_matrix(rng, num_outputs, width, format)
    x = narrow(rng.standard_normal((num_rows, width)).astype(np.float32), dtype)
    out = empty((num_rows, num_outputs), "f32")
    project(checked(), view(split(x)), matrix_view(w), view(out))
    expected = matmul(wide(x), w, "f32")
    assert (np.abs(out - expected) <= error_bound(wide(x), w)).all()


@pytest.mark.parametrize("format", ["int4_g64", "int4_g128", "int4", "int8"])
def test_scales_may_be_f16(format):
    rng = np.random.default_rng(0)
    w = random_matrix(rng, 40, 320, format, np.float16)
    x = narrow(rng.standard_normal((2, 320)).astype(np.float32), "bf16")
    out = empty((2, 40), "f32")
    project(checked(), view(split(x)), matrix_view(w), view(out))
    assert (np.abs(out - matmul(wide(x), w, "f32")) <= error_bound(wide(x), w)).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_byte_of_a_weight_is_unpacked_exactly(dtype):
    """Row r of the activations is one at column r: the outputs are the weights themselves."""
    data = np.arange(256, dtype=np.uint8).reshape(8, 32)
    for name, width in (("int8", 32), ("int4", 64), ("int2", 128)):
        w = random_matrix(np.random.default_rng(0), 8, width, name)
        w.data[...] = data
        w.scales[...] = 1.0
        out = empty((width, 8), "f32")
        ones = narrow(np.eye(width, dtype=np.float32), dtype)
        project(checked(), view(split(ones)), matrix_view(w), view(out))
        np.testing.assert_array_equal(out.T, dequantize(w))


def test_every_bit_of_an_f32_weight_counts():
    w = random_matrix(np.random.default_rng(6), 24, 64, "f32")
    w.data[...] *= np.exp2(np.random.default_rng(7).integers(-20, 20, w.shape)).astype(np.float32)
    out = empty((64, 24), "f32")
    ones = narrow(np.eye(64, dtype=np.float32), "bf16")
    project(checked(), view(split(ones)), matrix_view(w), view(out))
    np.testing.assert_array_equal(out.T, w.data)


@pytest.mark.parametrize("num_rows", [19, 70])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_every_pass(format, num_rows):
    """In tiles of 16 rows and of 64."""
    rng = np.random.default_rng(1)
    w = matrix_view(random_matrix(rng, 72, 160, format))
    x = split(narrow(rng.standard_normal((num_rows, 160)).astype(np.float32), "bf16"))
    together = empty((num_rows, 72), "f32")
    project(checked(), view(x), w, view(together))
    for row in (0, 7, 15, 16, 18):
        alone = empty((1, 72), "f32")
        project(checked(), view(x[row : row + 1]), w, view(alone))
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("format", FORMATS)
def test_two_products_in_one_launch_are_those_of_two(format, num_rows):
    rng = np.random.default_rng(8)
    x = view(split(narrow(rng.standard_normal((num_rows, 160)).astype(np.float32), "bf16")))
    weights = [matrix_view(random_matrix(rng, num_outputs, 160, format)) for num_outputs in (130, 33)]
    expected = [empty((num_rows, w.shape[0]), "f32") for w in weights]
    for w, out in zip(weights, expected, strict=True):
        project(checked(), x, w, view(out))
    found = [np.full_like(out, np.nan) for out in expected]
    project_both(checked(), x, weights[0], view(found[0]), weights[1], view(found[1]))
    other = matrix_view(random_matrix(rng, 24, 160, "int8" if format != "int8" else "int4"))
    mixed = empty((num_rows, 24), "f32"), empty((num_rows, 24), "f32")
    project(checked(), x, other, view(mixed[0]))
    project_both(checked(), x, other, view(mixed[1]), weights[1], view(found[1]))
    for one, two in zip([*expected, mixed[0]], [*found, mixed[1]], strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("format", ["int4_g64", "int8"])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_a_product_and_the_experts_behind_it_are_added_as_by_two_launches(num_rows, format):
    rng = np.random.default_rng(9)
    w = matrix_view(random_matrix(rng, 72, 160, format))
    x = view(split(narrow(rng.standard_normal((num_rows, 160)).astype(np.float32), "bf16")))
    stream = rng.standard_normal((num_rows, 72)).astype(np.float32)
    experts = rng.standard_normal((3 * num_rows, 72)).astype(np.float32)
    weights = rng.random((num_rows, 3)).astype(np.float32)
    expected, out = stream.copy(), stream.copy()
    project(checked(), x, w, view(expected), add=view(expected))
    combine(checked(), view(experts), view(weights), view(expected), view(expected))
    project_onto(checked(), x, w, view(experts), view(weights), view(out))
    np.testing.assert_array_equal(out, expected)


def test_residual_is_added_in_place():
    rng = np.random.default_rng(2)
    w = random_matrix(rng, 72, 160, "int4_g64")
    x = narrow(rng.standard_normal((3, 160)).astype(np.float32), "bf16")
    product = empty((3, 72), "f32")
    project(checked(), view(split(x)), matrix_view(w), view(product))
    residual = rng.standard_normal((3, 72)).astype(np.float32)
    out = residual.copy()
    project(checked(), view(split(x)), matrix_view(w), view(out), add=view(out))
    np.testing.assert_array_equal(out, product + residual)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_split_output_is_the_plain_one_rounded_and_reordered(dtype):
    rng = np.random.default_rng(3)
    w = matrix_view(random_matrix(rng, 72, 160, "int8"))
    x = view(split(narrow(rng.standard_normal((5, 160)).astype(np.float32), dtype)))
    plain, out = empty((5, 72), "f32"), empty((5, 72), dtype)
    project(checked(), x, w, view(plain))
    project(checked(), x, w, view(out), is_split=True)
    np.testing.assert_array_equal(unsplit(out), narrow(plain, dtype))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_rows", "heads", "nope", "value", "rank"), [(1, 3, 28, 22, 56), (3, 2, 64, 32, 128), (17, 1, 192, 4, 512)]
)
def test_absorbed_query_is_the_specified_one(format, num_rows, heads, nope, value, rank):
    rng = np.random.default_rng(rank)
    kv_b = random_matrix(rng, heads * (nope + value), rank, format)
    q = rng.standard_normal((num_rows, heads, nope + 12)).astype(np.float32)
    cos, sin = rope_tables(np.arange(5, 5 + num_rows), 10000.0, 12)
    out = empty((num_rows, heads, rank + 12), "bf16")
    absorb_query(checked(), view(q), matrix_view(kv_b), nope, value, view(cos), view(sin), view(out))
    expected = absorb_query_specified(np.ascontiguousarray(q[..., :nope]), kv_b, value)
    keys = np.abs(dequantize(kv_b)).reshape(heads, -1, rank)[:, :nope].astype(np.float64)
    size = np.einsum("thd,hdr->thr", np.abs(q[..., :nope]), keys)
    # the scaled query and the result are rounded to bf16
    assert (np.abs(wide(out)[..., :rank] - expected) <= 2 * HALF_ULP["bf16"] * size).all()
    rotated = rope_interleaved(q[..., nope:], cos, sin)
    np.testing.assert_allclose(wide(out)[..., rank:], rotated, rtol=1.01 * HALF_ULP["bf16"], atol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("num_rows", "heads", "nope", "value", "rank"), [(1, 6, 28, 22, 56), (17, 2, 8, 66, 128)])
def test_expanded_value_is_the_specified_one(format, num_rows, heads, nope, value, rank):
    rng = np.random.default_rng(rank)
    kv_b = random_matrix(rng, heads * (nope + value), rank, format)
    o = narrow(rng.standard_normal((num_rows, heads, rank)).astype(np.float32), "bf16")
    out = empty((num_rows, heads * value), "bf16")
    expand_value(checked(), view(split(o)), matrix_view(kv_b), nope, view(out))
    expected = expand_value_specified(wide(o), kv_b, nope, "f32").reshape(num_rows, -1)
    values = np.abs(dequantize(kv_b)).reshape(heads, -1, rank)[:, nope:].astype(np.float64)
    size = np.einsum("thr,har->tha", np.abs(wide(o)), values).reshape(num_rows, -1)
    bound = HALF_ULP["bf16"] * np.abs(expected) + 2 * SUM_ERROR * size
    assert (np.abs(wide(unsplit(out)) - expected) <= bound).all()


@pytest.mark.parametrize("format", FORMATS)
def test_embeddings_are_the_dequantized_rows_exactly(format):
    table = random_matrix(np.random.default_rng(0), 50, 1284, format)
    ids = np.array([49, 0, 7, 7], np.int32)
    out = empty((4, 1284), "f32")
    embed(checked(), view(ids), matrix_view(table), view(out))
    np.testing.assert_array_equal(out, dequantize(table)[ids])
