import itertools
import math

import numpy as np
import pytest

from glm_gpu.kernels import cpu
from glm_gpu.kernels.activation import exp
from glm_gpu.kernels.attention import attend_explicit, attend_latent, attend_latents
from glm_gpu.kernels.lanes import dot_rows, lane_sum
from glm_gpu.quant import bf16_to_f32, f32_to_bf16

pytestmark = pytest.mark.usefixtures("implementation")


def softmax_reference(q, keys, values, chosen, scale):
    """One head of one token in float64."""
    scores = [float(np.dot(q.astype(float), keys[s].astype(float))) * scale for s in chosen]
    weights = [math.exp(v - max(scores)) for v in scores]
    return sum(w * values[s].astype(float) for w, s in zip(weights, chosen, strict=True)) / sum(weights)


def latent_case(num_tokens, num_heads, width, num_positions, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_tokens, num_heads, width)).astype(np.float32)
    cache = rng.standard_normal((num_positions, width)).astype(np.float32)
    counts = rng.integers(1, num_positions + 1, num_tokens).astype(np.int32)
    counts[-1] = num_positions
    return q, cache, counts


def row_lists(counts, num_positions, max_rows, seed=0):
    rng = np.random.default_rng(seed)
    counts = np.minimum(counts, max_rows).astype(np.int32)
    rows = np.full((len(counts), max_rows), -1, dtype=np.int32)
    for t, count in enumerate(counts):
        rows[t, :count] = np.sort(rng.permutation(num_positions)[:count])
    return rows, counts


@pytest.mark.parametrize("num_heads", [1, 3, 8, 17])
@pytest.mark.parametrize("width, value_width", [(31, 17), (56, 40), (68, 68), (80, 64), (576, 512)])
def test_latent_attention_is_softmax_over_the_positions(num_heads, width, value_width):
    q, cache, counts = latent_case(3, num_heads, width, 33)
    scale = width**-0.5
    out = attend_latent(q, cache, value_width, None, counts, scale)
    for t, h in np.ndindex(3, num_heads):
        expected = softmax_reference(q[t, h], cache, cache[:, :value_width], range(counts[t]), scale)
        np.testing.assert_allclose(out[t, h], expected, atol=3e-6)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_only_listed_rows_are_seen(is_bf16):
    q, cache, counts = latent_case(17, 3, 68, 63)
    cache = f32_to_bf16(cache) if is_bf16 else cache
    rows, counts = row_lists(counts, 63, 31)
    out = attend_latent(q, cache, 56, rows, counts, 0.125)
    wide = bf16_to_f32(cache) if is_bf16 else cache
    for t, h in np.ndindex(17, 3):
        expected = softmax_reference(q[t, h], wide, wide[:, :56], rows[t, : counts[t]], 0.125)
        np.testing.assert_allclose(out[t, h], expected, atol=3e-6)


def test_listing_every_position_has_the_bits_of_no_list():
    q, cache, counts = latent_case(5, 4, 68, 40)
    rows = np.broadcast_to(np.arange(40, dtype=np.int32), (5, 40)).copy()
    np.testing.assert_array_equal(
        attend_latent(q, cache, 56, rows, counts, 0.125), attend_latent(q, cache, 56, None, counts, 0.125)
    )


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("is_listed", [False, True])
def test_explicit_attention_repeats_key_heads_consecutively(num_kv_heads, is_bf16, is_listed):
    rng = np.random.default_rng(num_kv_heads)
    q = rng.standard_normal((5, 6, 33)).astype(np.float32)
    keys = rng.standard_normal((29, num_kv_heads, 33)).astype(np.float32)
    values = rng.standard_normal((29, num_kv_heads, 31)).astype(np.float32)
    counts = np.int32([1, 29, 7, 17, 28])
    rows = None
    if is_listed:
        rows, counts = row_lists(counts, 29, 20)
    wide_keys, wide_values = keys, values
    if is_bf16:
        keys, values = f32_to_bf16(keys), f32_to_bf16(values)
        wide_keys, wide_values = bf16_to_f32(keys), bf16_to_f32(values)
    out = attend_explicit(q, keys, values, rows, counts, 0.2)
    for t, h in np.ndindex(5, 6):
        kv = h // (6 // num_kv_heads)
        chosen = range(counts[t]) if rows is None else rows[t, : counts[t]]
        expected = softmax_reference(q[t, h], wide_keys[:, kv], wide_values[:, kv], chosen, 0.2)
        np.testing.assert_allclose(out[t, h], expected, atol=3e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 63])
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_row_has_the_same_bits_alone(num_tokens, is_listed):
    q, cache, counts = latent_case(num_tokens, 5, 68, 70)
    rows = None
    if is_listed:
        rows, counts = row_lists(counts, 70, 33)
    together = attend_latent(q, cache, 56, rows, counts, 0.125)
    for t in range(num_tokens):
        one = slice(t, t + 1)
        seen = cache if is_listed else cache[: counts[t]]
        mine = None if rows is None else rows[one]
        np.testing.assert_array_equal(together[one], attend_latent(q[one], seen, 56, mine, counts[one], 0.125))


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("stops", [[1, 2, 3], [1, 18], [5, 9], [4]])
def test_sequences_together_have_the_bits_of_each_alone(stops, is_listed, is_bf16):
    parts = []
    for number, (first, stop) in enumerate(itertools.pairwise([0, *stops])):
        q, cache, counts = latent_case(stop - first, 5, 68, 40 + 30 * number, seed=number)
        cache = f32_to_bf16(cache) if is_bf16 else cache
        parts.append((q, cache, *(row_lists(counts, len(cache), 33, seed=number) if is_listed else (None, counts))))
    q, counts = (np.concatenate([part[i] for part in parts]) for i in (0, 3))
    rows = np.concatenate([part[2] for part in parts]) if is_listed else None
    together = attend_latents(q, [part[1] for part in parts], np.int32(stops), 56, rows, counts, 0.125)
    alone = [attend_latent(q, cache, 56, rows, counts, 0.125) for q, cache, rows, counts in parts]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_sums_run_in_the_stated_order():
    q, cache, counts = latent_case(3, 2, 68, 37)
    scale = np.float32(0.125)
    out = attend_latent(q, cache, 33, None, counts, float(scale))
    for t, h in np.ndindex(3, 2):
        scores = dot_rows(q[t, h : h + 1], cache[: counts[t]])[0] * scale
        weights = exp(scores - max(scores))
        acc = np.zeros(33, dtype=np.float32)
        for j in range(counts[t]):
            acc = acc + weights[j] * cache[j, :33]
        np.testing.assert_array_equal(out[t, h], acc / lane_sum(weights))


def test_unseen_positions_cannot_leak():
    q, cache, _ = latent_case(2, 3, 31, 20)
    counts = np.int32([5, 9])
    expected = attend_latent(q, cache, 16, None, counts, 0.2)
    cache[9:] = np.nan
    np.testing.assert_array_equal(attend_latent(q, cache, 16, None, counts, 0.2), expected)
    cache[5:] = np.inf
    np.testing.assert_array_equal(attend_latent(q[:1], cache, 16, None, counts[:1], 0.2), expected[:1])


def test_large_scores_do_not_overflow():
    q = np.full((1, 1, 16), 100, dtype=np.float32)
    cache = np.zeros((3, 16), dtype=np.float32)
    cache[1] = 100
    out = attend_latent(q, cache, 16, None, np.int32([3]), 1.0)
    np.testing.assert_array_equal(out[0, 0], cache[1])


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("num_heads", [1, 3, 8, 19])
@pytest.mark.parametrize("width, value_width", [(31, 17), (56, 40), (68, 68), (128, 64), (576, 512)])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_latent_attention_has_the_same_bits_everywhere(num_tokens, num_heads, width, value_width, is_bf16, same_bits):
    q, cache, counts = latent_case(num_tokens, num_heads, width, 133)
    cache = f32_to_bf16(cache) if is_bf16 else cache
    rows, row_counts = row_lists(counts, 133, 70)
    same_bits(lambda: attend_latent(q, cache, value_width, None, counts, width**-0.5))
    same_bits(lambda: attend_latent(q, cache, value_width, rows, row_counts, width**-0.5))


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("num_kv_heads, num_heads", [(1, 19), (2, 6), (5, 5)])
@pytest.mark.parametrize("key_width, value_width", [(31, 17), (128, 128)])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_explicit_attention_has_the_same_bits_everywhere(
    num_tokens, num_kv_heads, num_heads, key_width, value_width, is_bf16, same_bits
):
    rng = np.random.default_rng(num_heads)
    q, _, counts = latent_case(num_tokens, num_heads, key_width, 70)
    keys = rng.standard_normal((70, num_kv_heads, key_width)).astype(np.float32)
    values = rng.standard_normal((70, num_kv_heads, value_width)).astype(np.float32)
    if is_bf16:
        keys, values = f32_to_bf16(keys), f32_to_bf16(values)
    rows, row_counts = row_lists(counts, 70, 33)
    same_bits(lambda: attend_explicit(q, keys, values, None, counts, 0.2))
    same_bits(lambda: attend_explicit(q, keys, values, rows, row_counts, 0.2))


def test_scores_of_many_tokens_in_blocks_have_the_same_bits(same_bits):
    # 40 tokens x 64 heads x 1000 positions are 10 MiB of scores: three blocks.
    q, cache, counts = latent_case(40, 64, 33, 1000)
    same_bits(lambda: attend_latent(q, cache, 17, None, counts, 0.2))


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"counts": np.int32([0, 5])}, "counts: token 0 sees 0 rows"),
        ({"counts": np.int32([5, 8])}, "counts: token 1 sees 8 rows"),
        ({"counts": np.int32([5])}, "counts: dimension 0"),
        ({"rows": np.int32([[0, 1, 20, 3, 4, 5, 6]] * 2)}, "rows: token 0 sees row 20, expected 0 to 19"),
        ({"rows": np.int32([[0, -1, 2, 3, 4, 5, 6]] * 2)}, "rows: token 0 sees row -1"),
        ({"cache": np.zeros((20, 30), dtype=np.float32)}, "cache: dimension 1 is 30"),
        ({"out": np.zeros((2, 3, 32), dtype=np.float32)}, "expected at least 1 of 1 to 31"),
    ],
)
def test_c_refuses_what_would_read_outside_the_cache(damage, message, implementation):
    if implementation == "numpy":
        pytest.skip("the C binding's checks")
    good = {
        "q": np.zeros((2, 3, 31), dtype=np.float32),
        "cache": np.zeros((20, 31), dtype=np.float32),
        "rows": np.int32([[0, 1, 2, 3, 4, 5, 6]] * 2),
        "counts": np.int32([5, 7]),
        "scale": 1.0,
        "out": np.zeros((2, 3, 16), dtype=np.float32),
    }
    cpu.active.attend_latent(*good.values())
    with pytest.raises(ValueError, match=message):
        cpu.active.attend_latent(*(good | damage).values())


@pytest.mark.parametrize(
    "damage, error, message",
    [
        ({"stops": np.int32([1, 2])}, ValueError, "stops: found 2 behind 1, expected them to ascend to 3"),
        ({"stops": np.int32([1, 4])}, ValueError, "stops: found 4 behind 1"),
        ({"stops": np.int32([2, 1])}, ValueError, "stops: found 1 behind 2"),
        ({"stops": np.int32([-1, 3])}, ValueError, "stops: found -1 behind 0"),
        ({"stops": np.int32([3])}, ValueError, "stops: dimension 0 is 1, expected 2"),
        ({"counts": np.int32([9, 10, 20])}, ValueError, "counts: token 0 sees 9 rows, expected 1 to 8"),
        ({"rows": np.int32([[7], [8], [20]])}, ValueError, "rows: token 2 sees row 20, expected 0 to 19"),
        ({"caches": ()}, TypeError, "caches: expected a tuple"),
        ({"caches": [np.zeros((8, 31), np.float32)]}, TypeError, "caches: expected a tuple"),
        (
            {"caches": (np.zeros((8, 31), np.float32), np.zeros((20, 31), np.uint16))},
            TypeError,
            "cache: found elements",
        ),
        ({"caches": (np.zeros((8, 31), np.float32), np.zeros((20, 30), np.float32))}, ValueError, "dimension 1 is 30"),
        ({"out": np.zeros((3, 3, 32), dtype=np.float32)}, ValueError, "expected at least 1 of 1 to 31"),
    ],
)
def test_c_refuses_what_would_read_outside_any_of_several_caches(damage, error, message, implementation):
    if implementation == "numpy":
        pytest.skip("the C binding's checks")
    good = {
        "q": np.zeros((3, 3, 31), dtype=np.float32),
        "caches": (np.zeros((8, 31), np.float32), np.zeros((20, 31), np.float32)),
        "stops": np.int32([1, 3]),
        "rows": None,
        "counts": np.int32([8, 5, 20]),
        "scale": 1.0,
        "out": np.zeros((3, 3, 16), dtype=np.float32),
    }
    if "rows" in damage:
        good["counts"] = np.int32([1, 1, 1])
    cpu.active.attend_latents(*good.values())
    with pytest.raises(error, match=message):
        cpu.active.attend_latents(*(good | damage).values())
