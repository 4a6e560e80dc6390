import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glm_gpu import sampling
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.sampling import SamplingParams, make_rng, sample

VOCABULARY = 154_880
NO_HISTORY: list[int] = []

some_logits = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.sampled_from([-np.inf, -30, -2, -1, 0, 0.5, 1, 1.5, 2, 7])
).filter(lambda logits: bool(np.isfinite(logits).any()))


def nucleus_by_definition(logits: np.ndarray, p: float) -> list[int]:
    """Tokens taken best first, lowest id of equals first, until their probabilities sum to p."""
    weights = [math.exp(float(logit) - float(logits.max())) for logit in logits]
    target, kept, total = p * math.fsum(weights), [], 0.0
    for position in sorted(range(len(logits)), key=lambda i: (-logits[i], i)):
        kept.append(position)
        total += weights[position]
        if total >= target:
            break
    return sorted(kept)


@given(some_logits, st.integers(1, 50))
def test_top_k_keeps_the_best_and_the_lowest_ids_of_equals(logits, k):
    expected = sorted(sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k])
    assert sampling.keep_top_k(logits, k).tolist() == expected


# sums that fall on p to the last bit may go either way; these values of p do not meet them
@given(some_logits, st.sampled_from([0.0, 0.0137, 0.31, 0.7001, 0.9503, 0.99907]))
def test_top_p_keeps_the_fewest_that_reach_the_sum(logits, p):
    assert sampling.keep_top_p(logits, p).tolist() == nucleus_by_definition(logits, p)


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_top_p_of_a_whole_vocabulary_is_the_definition(scale):
    logits = (np.random.default_rng(5).standard_normal(VOCABULARY) * scale).astype(np.float32)
    kept = sampling.keep_top_p(logits, 0.9)
    probs = np.exp(np.sort(logits)[::-1].astype(np.float64))
    expected = int(np.searchsorted(np.cumsum(probs), 0.9 * probs.sum())) + 1
    # f32 exponentials are off by 1e-7, so the border moves by about that share of the kept tokens
    assert abs(len(kept) - expected) <= 1 + expected * 1e-6
    assert set(kept) == set(sampling.keep_top_k(logits, len(kept)))


def test_token_that_reaches_top_p_is_kept():
    logits = np.log(np.array([0.5, 0.25, 0.25], dtype=np.float32))
    assert sampling.keep_top_p(logits, 0.5).tolist() == [0]
    assert sampling.keep_top_p(logits, 0.51).tolist() == [0, 1]


def test_min_p_is_relative_to_the_best():
    logits = np.log(np.array([0.2, 0.019, 0.021, 0.76], dtype=np.float32))
    assert sampling.keep_min_p(logits, 0.0263).tolist() == [0, 2, 3]
    assert sampling.keep_min_p(logits, 1.0).tolist() == [3]


def test_top_p_counts_what_top_k_left():
    # of the two best, 0.4 / 0.7 = 0.57 reaches 0.5; of the whole vocabulary it would not
    logits = np.log(np.array([0.4, 0.3, 0.3], dtype=np.float32))
    params = SamplingParams(top_k=2, top_p=0.5, seed=0)
    rng = make_rng(0)
    assert {sample(logits, params, NO_HISTORY, rng) for _ in range(50)} == {0}


def test_temperature_comes_before_top_p():
    # hot enough, the best token alone no longer reaches 0.5
    logits = np.array([2.0, 0.0, 0.0, 0.0], dtype=np.float32)
    rng = make_rng(3)
    cold = {sample(logits, SamplingParams(temperature=1.0, top_p=0.5), NO_HISTORY, rng) for _ in range(200)}
    hot = {sample(logits, SamplingParams(temperature=50.0, top_p=0.5), NO_HISTORY, rng) for _ in range(200)}
    assert (cold, hot) == ({0}, {0, 1})


def test_penalties_follow_their_definitions():
    logits = np.array([2.0, -2.0, 1.0, 1.0, -np.inf], dtype=np.float32)
    history = np.array([0, 1, 0, 2, 2, 2, 4])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    penalized = sampling.apply_penalties(logits, params, history, num_prompt=3)
    # 0 and 1 stand in the prompt: repetition only; 2 was generated three times
    np.testing.assert_array_equal(penalized, np.array([1, -4, 0.5 - 0.5 - 0.75, 1, -np.inf], dtype=np.float32))
    assert logits[0] == 2.0, "the argument was changed"


def test_penalties_change_the_greedy_choice_too():
    logits = np.array([1.0, 1.1], dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=0, presence_penalty=1), [1], make_rng(0)) == 0


def test_draws_follow_the_probabilities():
    probs = np.array([0.5, 0.0, 0.2, 0.3])
    with np.errstate(divide="ignore"):
        logits = np.log(probs).astype(np.float32)
    rng, num = make_rng(11), 20_000
    counts = Counter(sample(logits, SamplingParams(), NO_HISTORY, rng) for _ in range(num))
    assert counts[1] == 0
    for token_id, p in enumerate(probs):
        assert abs(counts[token_id] - num * p) <= 4 * math.sqrt(num * p * (1 - p)), token_id


@given(some_logits, st.floats(0, 1, exclude_max=True))
def test_draw_is_where_the_running_sum_passes_the_number(logits, uniform):
    weights = [math.exp(float(logit) - float(logits.max())) for logit in logits]
    at = sampling.draw(logits, uniform)
    assert weights[at] > 0
    slack = 1e-6 * math.fsum(weights)
    assert math.fsum(weights[:at]) - slack <= uniform * math.fsum(weights) <= math.fsum(weights[: at + 1]) + slack


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 5000])
def test_draw_never_lands_on_a_forbidden_token(length, uniform):
    for possible in {0, length // 2, length - 1}:
        logits = np.full(length, -np.inf, dtype=np.float32)
        logits[possible] = -3.0
        assert sampling.draw(logits, uniform) == possible


def test_one_number_a_token_whatever_the_parameters():
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    for params in (SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=0.1, min_p=0.5, temperature=2)):
        rng, reference = make_rng(9), make_rng(9)
        sample(logits, params, NO_HISTORY, rng)
        reference.random()
        assert rng.random() == reference.random(), params


def test_seed_alone_decides_the_draws():
    logits = np.random.default_rng(0).standard_normal((8, 500)).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=42)

    def tokens(seed: int | None) -> list[int]:
        rng = make_rng(seed)
        return [sample(row, params, NO_HISTORY, rng) for row in logits]

    assert tokens(42) == tokens(42)
    assert tokens(42) != tokens(43)
    assert tokens(-1) == tokens(2**64 - 1)
    assert len({tuple(tokens(None)) for _ in range(3)}) > 1


def test_requests_side_by_side_draw_what_they_draw_alone():
    logits = np.random.default_rng(0).standard_normal((6, 200)).astype(np.float32)
    alone, first, second = make_rng(1), make_rng(1), make_rng(2)
    expected = [sample(row, SamplingParams(), NO_HISTORY, alone) for row in logits]
    beside = []
    for row in logits:
        beside.append(sample(row, SamplingParams(), NO_HISTORY, first))
        sample(row, SamplingParams(), NO_HISTORY, second)
    assert beside == expected


def test_temperature_zero_takes_the_lowest_id_of_equals():
    logits = np.array([1, 3, 3, 3], dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=0), NO_HISTORY, make_rng(0)) == 1
    assert sampling.greedy(logits) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-6])
def test_tiny_temperature_is_greedy_and_free_of_overflow(temperature):
    logits = np.array([-np.inf, 1e30, 9, -1e30], dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=temperature, top_p=0.9), NO_HISTORY, make_rng(0)) == 1


@given(
    some_logits,
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 1e-300, 1e-6, 1, 2, 100]),
        top_p=st.sampled_from([0, 1e-9, 0.5, 1]),
        top_k=st.sampled_from([0, 1, 3, 10**6]),
        min_p=st.sampled_from([0, 1e-300, 0.2, 1]),
        repetition_penalty=st.sampled_from([0.01, 1, 100]),
        presence_penalty=st.sampled_from([-2, 0, 2]),
    ),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=400)
def test_every_combination_gives_a_possible_token(logits, params, seed):
    history = [int(np.argmax(logits))]
    assert np.isfinite(logits[sample(logits, params, history, make_rng(seed))])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_refused_rather_than_sampled(temperature, bad):
    logits = np.array([0, bad, 1], dtype=np.float32)
    with pytest.raises(CheckpointError, match="weights are damaged"):
        sample(logits, SamplingParams(temperature=temperature), NO_HISTORY, make_rng(0))


def test_no_possible_token_is_an_error_and_not_token_zero():
    logits = np.full(4, -np.inf, dtype=np.float32)
    for temperature in (0, 1):
        with pytest.raises(RequestError, match="no token may come next"):
            sample(logits, SamplingParams(temperature=temperature), NO_HISTORY, make_rng(0))
    with pytest.raises(RequestError):
        sampling.logprobs(logits)


def test_logprobs_are_of_the_raw_logits():
    """C47."""
    logits = np.array([1.0, 2.0, -np.inf, 500.0, 499.0], dtype=np.float32)
    values = sampling.logprobs(logits)
    assert values.dtype == np.float64
    assert math.fsum(np.exp(values)) == pytest.approx(1, abs=1e-12)
    assert values[3] == pytest.approx(-math.log1p(math.exp(-1)), rel=1e-12)
    assert values[2] == -np.inf


def test_top_logprobs_are_best_first_and_lowest_ids_of_equals():
    values = sampling.logprobs(np.array([0, 2, 1, 2, 2], dtype=np.float32))
    assert [token_id for token_id, _ in sampling.top_logprobs(values, 2)] == [1, 3]
    assert [token_id for token_id, _ in sampling.top_logprobs(values, 21)] == [1, 3, 4, 2, 0]
    assert sampling.top_logprobs(values, 0) == []


@pytest.mark.parametrize(
    "parameter, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 1e9),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_a_value_out_of_range_names_its_parameter(parameter, value):
    with pytest.raises(RequestError, match=rf"^{parameter} is .*, expected a (whole )?number from") as error:
        SamplingParams(**{parameter: value})
    assert "\n" not in str(error.value)


def test_checkpoint_recommends_the_defaults():
    config = json.loads('{"do_sample": true, "temperature": 0.8, "top_p": 0.95, "top_k": null, "eos_token_id": [1]}')
    assert SamplingParams.from_generation_config(config) == SamplingParams(temperature=0.8, top_p=0.95)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.8}).is_greedy
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p is 7"):
        SamplingParams.from_generation_config({"top_p": 7})
