import numpy as np
import pytest
from device_arrays import HALF_ULP, Caches, checked, checked_over, empty, narrow, unsplit, view, wide

from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.kernels.gpu.rows import append, append_index_key, append_latent, rope
from glm_gpu.kernels.norm import layer_norm
from glm_gpu.kernels.norm import rms_norm as rms_norm_specified
from glm_gpu.kernels.rope import rope_half, rope_interleaved, rope_tables

EPS = 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 160), (17, 132)])
def test_norm_is_the_specified_one_plain_and_split(num_rows, width, dtype):
    rng = np.random.default_rng(width)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    out, divided = empty((num_rows, width), "f32"), empty((num_rows, width), dtype)
    rms_norm(checked(), view(x), view(weight), EPS, view(out), view(divided))
    np.testing.assert_allclose(out, rms_norm_specified(x, weight, EPS), rtol=4e-6)
    np.testing.assert_array_equal(unsplit(divided), narrow(out, dtype))


def test_two_norms_side_by_side_are_one_split_row():
    rng = np.random.default_rng(4)
    one, other = (rng.standard_normal((3, 160)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(160).astype(np.float32)
    divided, plain = empty((3, 320), "bf16"), [empty((3, 160), "f32") for _ in range(2)]
    for begin, x, out in ((0, one, plain[0]), (160, other, plain[1])):
        rms_norm(checked(), view(x), view(weight), EPS, view(out), view(divided), begin)
    np.testing.assert_array_equal(unsplit(divided), narrow(np.concatenate(plain, axis=1), "bf16"))


def test_activations_are_split_without_a_norm():
    x = np.random.default_rng(0).standard_normal((3, 160)).astype(np.float32)
    divided = empty((3, 160), "bf16")
    rms_norm(checked(), view(x), None, EPS, split=view(divided))
    np.testing.assert_array_equal(unsplit(divided), narrow(x, "bf16"))


def tables(num_rows, rope_width):
    return rope_tables(np.arange(5, 5 + num_rows), 10000.0, rope_width)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("rank", "rope_width"), [(56, 12), (512, 64), (64, 16)])
def test_latent_row_is_normed_rotated_and_stored_at_its_position(rank, rope_width, dtype):
    rng = np.random.default_rng(rank)
    width, offset = rank + rope_width, 48
    kv = rng.standard_normal((3, width)).astype(np.float32)
    weight = rng.standard_normal(rank).astype(np.float32)
    cos, sin = tables(3, rope_width)
    caches = Caches.of(rng, (4, 9), width, dtype, offset)
    before = [caches.rows(i, width, dtype, offset).copy() for i in range(2)]
    sequences, positions = np.array([1, 0, 1]), np.array([0, 3, 8], np.int32)
    arguments = view(kv), view(weight), EPS, view(cos), view(sin), view(caches.addresses[sequences])
    append_latent(checked_over(*caches.arrays), *arguments, offset, view(positions), dtype)
    latent = rms_norm_specified(kv[:, :rank], weight, EPS)
    expected = np.concatenate([latent, rope_interleaved(kv[:, rank:], cos, sin)], axis=1)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        stored = wide(caches.rows(sequence, width, dtype, offset)[position])
        np.testing.assert_allclose(stored, expected[row], rtol=1.01 * HALF_ULP[dtype], atol=1e-6)
        before[sequence][position] = caches.rows(sequence, width, dtype, offset)[position]
    for sequence in range(2):  # nothing else has changed
        np.testing.assert_array_equal(caches.rows(sequence, width, dtype, offset), before[sequence])


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(("width", "rope_width"), [(32, 12), (128, 64), (24, 24)])
def test_index_key_is_normed_rotated_and_stored(width, rope_width, is_interleaved):
    rng = np.random.default_rng(width)
    keys = rng.standard_normal((2, width)).astype(np.float32) + np.float32(3)
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    cos, sin = tables(2, rope_width)
    caches = Caches.of(rng, (7, 7), width, "bf16")
    positions = np.array([6, 2], np.int32)
    norm = view(weight.copy()), view(bias.copy()), EPS
    rotation = view(cos), view(sin), is_interleaved
    where = view(caches.addresses), 0, view(positions), "bf16"
    append_index_key(checked_over(*caches.arrays), view(keys), *norm, *rotation, *where)
    normed = layer_norm(keys, weight, bias, EPS)
    rotate = rope_interleaved if is_interleaved else rope_half
    normed[:, :rope_width] = rotate(normed[:, :rope_width].copy(), cos, sin)
    for row in range(2):
        stored = wide(caches.rows(row, width, "bf16")[positions[row]])
        np.testing.assert_allclose(stored, normed[row], rtol=1.01 * HALF_ULP["bf16"], atol=1e-5)


def test_plain_rows_are_clipped_and_stored():
    rng = np.random.default_rng(0)
    rows = 4 * rng.standard_normal((2, 96)).astype(np.float32)
    caches = Caches.of(rng, (3,), 96, "f16")
    positions = np.array([2, 0], np.int32)
    addresses = caches.addresses[[0, 0]]
    append(checked_over(*caches.arrays), view(rows), view(addresses), 0, view(positions), "f16", clip=2.5)
    stored = caches.rows(0, 96, "f16")[positions]
    np.testing.assert_array_equal(stored, np.clip(rows, -2.5, 2.5).astype(np.float16))


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(("num_rows", "heads", "rope_width", "copied"), [(1, 6, 12, 0), (3, 8, 12, 20), (17, 1, 64, 0)])
def test_rotation_is_the_specified_one(num_rows, heads, rope_width, copied, is_interleaved):
    rng = np.random.default_rng(heads)
    x = rng.standard_normal((num_rows, heads, 28 + rope_width + copied)).astype(np.float32)
    cos, sin = tables(num_rows, rope_width)
    out = empty((num_rows, heads, 8 + rope_width + copied), "f32")
    rope(checked(), view(x), 28, view(cos), view(sin), is_interleaved, view(out), 8, copied)
    rotate = rope_interleaved if is_interleaved else rope_half
    expected = rotate(np.ascontiguousarray(x[..., 28 : 28 + rope_width]), cos, sin)
    np.testing.assert_allclose(out[..., 8 : 8 + rope_width], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[..., 8 + rope_width :], x[..., 28 + rope_width :])
    assert np.isnan(out[..., :8]).all()


def test_rotation_clips_before():
    x = np.array([[[9.0, -9.0, 1.0, 2.0]]], np.float32)
    cos, sin = tables(1, 4)
    out = empty((1, 1, 4), "f32")
    rope(checked(), view(x), 0, view(cos), view(sin), False, view(out), 0, clip=3.0)
    np.testing.assert_allclose(out, rope_half(np.clip(x, -3, 3), cos, sin), rtol=1e-6)
