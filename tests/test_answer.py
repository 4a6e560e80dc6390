"""Choosing and verifying tokens: the distribution is the model's own, whatever is drafted."""

import numpy as np
import pytest

from glm_gpu.answer import Answer
from glm_gpu.errors import CheckpointError
from glm_gpu.sampling import SamplingParams, apply_temperature, make_rng

# A model of five tokens whose next logits depend on the last token only.
LOGITS = np.random.default_rng(11).normal(0, 1.2, (5, 5)).astype(np.float32)
FIRST = 2
BEST = int(LOGITS[FIRST].argmax())
NUM_DRAWS = 8_000
# Chi-square with 24 degrees of freedom: 1e-6 of all sound samples are above. Wrong rules come out in the hundreds.
CHI_SQUARE_LIMIT = 73.0


def probabilities() -> np.ndarray:
    """Of each pair of tokens behind FIRST, [5, 5] f64."""
    p = np.exp(LOGITS.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    return p[FIRST][:, None] * p


def chi_square(pairs: list[tuple[int, int]]) -> float:
    expected = probabilities() * len(pairs)
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(np.array(pairs).T), 1)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.fixture
def one_rng(monkeypatch):
    """All answers draw from one generator: to make a new one takes longer than an answer."""
    rng = make_rng(7)
    monkeypatch.setattr("glm_gpu.answer.make_rng", lambda seed: rng)


def draw_pairs(drafted_ids: list[int]) -> list[tuple[int, int]]:
    """The first two tokens of many answers, verified against the same drafts."""
    pairs = []
    for _ in range(NUM_DRAWS):
        answer = Answer([FIRST], SamplingParams(), max_tokens=2)
        answer.verify(drafted_ids, LOGITS[[FIRST, *drafted_ids]])
        if len(answer.ids) < 3:
            answer.verify([], LOGITS[answer.ids[-1:]])
        pairs.append(tuple(answer.ids[1:3]))
    return pairs


@pytest.mark.parametrize("drafted_ids", [[], [0], [BEST], [3, 3]])
def test_sampled_answers_are_distributed_as_without_drafts(one_rng, drafted_ids):
    assert chi_square(draw_pairs(drafted_ids)) < CHI_SQUARE_LIMIT


def keep_twice_as_often(drafted: int, p: np.ndarray, rng: np.random.Generator) -> int:
    rest = p * (np.arange(5) != drafted)
    return drafted if rng.random() < 2 * p[drafted] else int(rng.choice(5, p=rest / rest.sum()))


def draw_again_from_all(drafted: int, p: np.ndarray, rng: np.random.Generator) -> int:
    return drafted if rng.random() < p[drafted] else int(rng.choice(5, p=p))


def keep_if_likely(drafted: int, p: np.ndarray, rng: np.random.Generator) -> int:
    return drafted if p[drafted] > 0.05 else int(rng.choice(5, p=p))


@pytest.mark.parametrize("rule", [keep_twice_as_often, draw_again_from_all, keep_if_likely])
def test_the_distribution_test_catches_wrong_rules(rule):
    rng = make_rng(1)
    p = np.exp(LOGITS.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    pairs = []
    for _ in range(NUM_DRAWS):
        first = rule(BEST, p[FIRST], rng)
        pairs.append((first, int(rng.choice(5, p=p[first]))))
    assert chi_square(pairs) > 2 * CHI_SQUARE_LIMIT


def test_one_number_is_drawn_for_each_token_accepted_or_not():
    """So that a seed gives the same answer with drafts and without."""
    plain, drafted = (Answer([FIRST], SamplingParams(seed=8), max_tokens=12) for _ in range(2))
    while not plain.is_finished:
        plain.verify([], LOGITS[plain.ids[-1:]])
    while not drafted.is_finished:
        guesses = [int(LOGITS[drafted.ids[-1]].argmax()), 1, 4][: drafted.num_left - 1]
        drafted.verify(guesses, LOGITS[[drafted.ids[-1], *guesses]])
    assert drafted.ids == plain.ids


def test_verification_stops_behind_the_first_wrong_draft():
    best = [int(row.argmax()) for row in LOGITS]
    answer = Answer([FIRST], SamplingParams(temperature=0), max_tokens=9)
    right = best[FIRST]
    wrong = (best[right] + 1) % 5
    chosen = answer.verify([right, wrong, 0], LOGITS[[FIRST, right, wrong, 0]])
    assert chosen == [right, best[right]]
    assert answer.ids == [FIRST, right, best[right]]


def test_an_end_token_is_chosen_but_no_part_of_the_answer():
    best = int(LOGITS[FIRST].argmax())
    answer = Answer([FIRST], SamplingParams(temperature=0), max_tokens=9, end_ids=frozenset([best]))
    assert answer.verify([best, 0], LOGITS[[FIRST, best, 0]]) == [best]
    assert (answer.ids, answer.finish_reason) == ([FIRST], "stop")


def test_tokens_of_probability_zero_are_never_accepted():
    logits = LOGITS[[FIRST, 0]].copy()
    logits[0, 3] = -np.inf
    for seed in range(200):
        answer = Answer([FIRST], SamplingParams(seed=seed), max_tokens=2)
        assert answer.verify([3], logits)[0] != 3
    assert np.isneginf(apply_temperature(logits[0], 1.0)[3])


def test_penalties_count_the_answer_s_tokens_and_not_the_prompt_s():
    best = int(LOGITS[FIRST].argmax())
    answer = Answer([best, FIRST], SamplingParams(temperature=0, presence_penalty=50.0), max_tokens=3)
    assert answer.choose(LOGITS[FIRST]) == best
    assert answer.choose(LOGITS[FIRST]) != best


def test_best_ids_are_taken_as_their_logits_would_be():
    logits = LOGITS[[FIRST, BEST, 0]]
    drafted_ids = logits.argmax(axis=1)[:2].tolist()
    answers = [Answer([FIRST], SamplingParams(temperature=0.0), 8) for _ in range(2)]
    from_logits, from_ids = (
        answer.verify(drafted_ids, behind)
        for answer, behind in zip(answers, (logits, logits.argmax(axis=1).astype(np.int32)), strict=True)
    )
    assert from_ids == from_logits and answers[0].ids == answers[1].ids and len(from_ids) == 3


def test_the_best_id_of_damaged_logits_is_an_error():
    answer = Answer([FIRST], SamplingParams(temperature=0.0), 8)
    with pytest.raises(CheckpointError, match="damaged"):
        answer.choose(np.int32(-1))
    assert answer.ids == [FIRST]
