import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_gpu.kernels.indexer import index_scores, select_top
from glm_gpu.quant import bf16_to_f32, f32_to_bf16

pytestmark = pytest.mark.usefixtures("implementation")


def case(num_tokens, num_heads, width, num_positions, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_tokens, num_heads, width)).astype(np.float32)
    head_weights = rng.standard_normal((num_tokens, num_heads)).astype(np.float32)
    keys = rng.standard_normal((num_positions, width)).astype(np.float32)
    counts = rng.integers(1, num_positions + 1, num_tokens).astype(np.int32)
    counts[-1] = num_positions
    return q, head_weights, keys, counts


@pytest.mark.parametrize("num_heads", [1, 3, 8, 17, 32])
@pytest.mark.parametrize("width", [31, 56, 128])
def test_scores_sum_the_positive_products_of_all_heads(num_heads, width):
    q, head_weights, keys, counts = case(3, num_heads, width, 21)
    scores = index_scores(q, head_weights, keys, counts, 0.3)
    for t, count in enumerate(counts):
        for s in range(count):
            dots = [float(np.dot(q[t, j].astype(float), keys[s].astype(float))) * 0.3 for j in range(num_heads)]
            terms = [float(w) * max(d, 0.0) for w, d in zip(head_weights[t], dots, strict=True)]
            bound = 1e-6 * sum(abs(w) for w in head_weights[t].tolist()) * width
            assert scores[t, s] == pytest.approx(sum(terms), abs=bound)
        assert (scores[t, count:] == -np.inf).all()


def test_a_position_all_heads_cut_scores_exactly_zero():
    q = np.ones((1, 2, 4), dtype=np.float32)
    scores = index_scores(q, np.float32([[1, -1]]), -np.ones((3, 4), dtype=np.float32), np.int32([3]), 1.0)
    assert scores.tolist() == [[0, 0, 0]] and not np.signbit(scores).any()


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 63])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_row_has_the_same_bits_alone(num_tokens, is_bf16):
    q, head_weights, keys, counts = case(num_tokens, 5, 33, 68)
    keys = f32_to_bf16(keys) if is_bf16 else keys
    together = index_scores(q, head_weights, keys, counts, 0.25)
    rows, num = select_top(together, counts, 20)
    for t in range(num_tokens):
        one = slice(t, t + 1)
        alone = index_scores(q[one], head_weights[one], keys[: counts[t]], counts[one], 0.25)
        np.testing.assert_array_equal(together[one, : counts[t]], alone)
        rows_alone, num_alone = select_top(alone, counts[one], 20)
        assert num_alone[0] == num[t]
        np.testing.assert_array_equal(rows[t, : num[t]], rows_alone[0, : num[t]])


def test_bfloat16_keys_score_as_their_f32_values():
    q, head_weights, keys, counts = case(3, 8, 128, 40)
    bits = f32_to_bf16(keys)
    expected = index_scores(q, head_weights, bf16_to_f32(bits), counts, 0.25)
    np.testing.assert_array_equal(index_scores(q, head_weights, bits, counts, 0.25), expected)


def ranked(scores, top_k):
    return sorted(sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:top_k])


few_values = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 0.5, 3e38, -3e38, 1e-45])


@given(
    st.lists(st.one_of(few_values, st.floats(width=32, allow_nan=False)), min_size=1, max_size=80),
    st.integers(1, 90),
    st.data(),
)
def test_the_best_positions_are_chosen_and_ties_go_to_the_lowest(values, top_k, data):
    count = data.draw(st.integers(1, len(values)))
    rows, num = select_top(np.float32([values]), np.int32([count]), top_k)
    expected = ranked(values[:count], top_k)
    assert rows.shape == (1, min(top_k, len(values)))
    assert num[0] == len(expected)
    assert rows[0].tolist() == expected + [-1] * (rows.shape[1] - len(expected))


@pytest.mark.parametrize("top_k", [1, 7, 2048])
def test_selection_holds_over_thousands_of_near_ties(top_k):
    rng = np.random.default_rng(top_k)
    scores = (rng.integers(-40, 40, (3, 5000)) / 8).astype(np.float32)
    counts = np.int32([5000, 2049, 3])
    rows, num = select_top(scores, counts, top_k)
    for t, count in enumerate(counts):
        assert rows[t, : num[t]].tolist() == ranked(scores[t, :count].tolist(), top_k)
        assert (rows[t, num[t] :] == -1).all()


def test_no_position_beyond_the_count_is_ever_chosen():
    scores = np.float32([[0, -np.inf, -5, 100, 100]])
    rows, num = select_top(scores, np.int32([3]), 4)
    assert rows.tolist() == [[0, 1, 2, -1]] and num.tolist() == [3]


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("num_heads, width", [(1, 31), (3, 56), (8, 33), (32, 128), (2, 576), (2, 1100)])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_scores_and_choice_have_the_same_bits_everywhere(num_tokens, num_heads, width, is_bf16, same_bits):
    q, head_weights, keys, counts = case(num_tokens, num_heads, width, 133)
    keys = f32_to_bf16(keys) if is_bf16 else keys
    same_bits(lambda: index_scores(q, head_weights, keys, counts, width**-0.5))
    scores = np.round(index_scores(q, head_weights, keys, counts, width**-0.5), 1)
    for top_k in (1, 20, 200):
        same_bits(lambda top_k=top_k: select_top(scores, counts, top_k))


def test_c_refuses_counts_beyond_the_keys(implementation):
    if implementation == "numpy":
        pytest.skip("the C binding's checks")
    q, head_weights, keys, counts = case(2, 3, 31, 20)
    counts[0] = 21
    with pytest.raises(ValueError, match="token 0 sees 21 positions, expected 0 to 20"):
        index_scores(q, head_weights, keys, counts, 1.0)
    with pytest.raises(ValueError, match="token 0 sees 21 positions, expected 0 to 20"):
        select_top(np.zeros((2, 20), dtype=np.float32), counts, 4)
    with pytest.raises(TypeError, match="keys: expected a C-contiguous"):
        index_scores(q, head_weights, np.asfortranarray(keys), counts, 1.0)
