"""A session's answers: the same with drafts as without, and a cache that always holds what the ids say."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from planned import PlannedDrafter

from glm_gpu.engine import Engine
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams
from glm_gpu.session import Session
from glm_gpu.speculative import MtpDrafter, Speculator, WidthPolicy

GREEDY = SamplingParams(temperature=0)
PROMPT = [17, 41, 5, 250, 17, 41, 5, 250, 17, 41]
PATTERNS: dict[str, Callable[[int], bool]] = {
    "all": lambda place: True,
    "none": lambda place: False,
    "one of three": lambda place: place % 3 == 0,
    "random": np.random.default_rng(5).integers(0, 2, 4096).astype(bool).__getitem__,
}


@pytest.fixture(scope="module")
def engine(oracle_dir):
    """The oracle's GLM with its multi-token layer, in float weights."""
    options = EngineOptions(weights="f32", activations="f32", context=64, speculate="mtp")
    with Engine.open(oracle_dir / "tiny_glm", options) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine):
    """plain(prompt, params, ...) -> the answer without drafts."""

    @functools.cache
    def answer(prompt, params, max_tokens, ignore_eos) -> list[int]:
        session = session_of(engine, Speculator("off", WidthPolicy()))
        return list(session.generate(prompt, params, max_tokens, ignore_eos))

    return lambda prompt=PROMPT, params=GREEDY, max_tokens=20, ignore_eos=False: answer(
        tuple(prompt), params, max_tokens, ignore_eos
    )


def session_of(engine: Engine, speculator: Speculator, eos_ids: frozenset[int] | None = None) -> Session:
    cache = engine.model.new_cache(engine.context, is_bf16=False)
    return Session(engine.model, cache, engine.eos_ids if eos_ids is None else eos_ids, speculator)


def planned(engine, known_ids, is_right, width, eos_ids=None) -> Session:
    drafter = PlannedDrafter(known_ids, is_right, engine.config.vocab_size)
    return session_of(engine, Speculator("mtp", WidthPolicy(fixed_width=width), drafter), eos_ids)


def mtp_drafter(engine: Engine) -> MtpDrafter:
    return MtpDrafter(engine.mtp_head, engine.context, is_bf16=False, shares_selection=True)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_answers_are_those_without_drafts(engine, plain, pattern, width):
    expected = plain()
    session = planned(engine, PROMPT + expected, PATTERNS[pattern], width)
    assert list(session.generate(PROMPT, GREEDY, 20)) == expected
    if pattern == "all":
        assert session.last.num_passes == -(-19 // (width + 1))
    if pattern == "none":
        assert session.last.num_passes == 19


@pytest.mark.parametrize("mode", ["mtp", "ngram", "auto"])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_drafter_and_mixture_gives_the_plain_answer(engine, plain, mode, width):
    mtp = mtp_drafter(engine) if mode != "ngram" else None
    session = session_of(engine, Speculator(mode, WidthPolicy(fixed_width=width), mtp))
    prompt = PROMPT + plain() + PROMPT  # so that there is something to repeat
    assert list(session.generate(prompt, GREEDY, 12)) == plain(prompt, max_tokens=12)
    assert session.last.drafted_tokens > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.2, seed=3),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=40, seed=4),
        SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.7, seed=6),
    ],
)
def test_each_token_is_chosen_with_the_history_and_draw_it_has_without_drafts(engine, plain, params):
    expected = plain(params=params)
    session = planned(engine, PROMPT + expected, PATTERNS["random"], 4)
    assert list(session.generate(PROMPT, params, 20)) == expected
    assert session.last.accepted_tokens > 3


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
def test_max_tokens_is_exact_however_many_drafts_are_right(engine, plain, max_tokens):
    session = planned(engine, PROMPT + plain(), PATTERNS["all"], 4)
    assert len(list(session.generate(PROMPT, GREEDY, max_tokens))) == max_tokens
    assert (session.last.completion_tokens, session.last.finish_reason) == (max_tokens, "length")
    assert session.last.num_passes + session.last.drafted_tokens <= max_tokens - 1 or max_tokens == 1


def test_the_context_can_be_filled_to_its_last_position(engine, plain):
    expected = plain(max_tokens=None, ignore_eos=True)
    assert len(expected) == engine.context - len(PROMPT)
    session = planned(engine, PROMPT + expected, PATTERNS["all"], 8)
    assert list(session.generate(PROMPT, GREEDY, None, ignore_eos=True)) == expected


@pytest.mark.parametrize("place", range(1, 7))
def test_an_end_token_inside_accepted_drafts_ends_the_answer_and_the_cache_there(engine, plain, place):
    text = plain(max_tokens=16)
    assert text[place] not in text[:place]
    session = planned(engine, PROMPT + text, PATTERNS["all"], 3, eos_ids=frozenset([text[place]]))
    assert list(session.generate(PROMPT, GREEDY, 16)) == text[:place]
    assert session.last.finish_reason == "stop"
    assert session.cached_ids == (PROMPT + text[:place])[: len(session.cached_ids)]
    assert list(session.generate(PROMPT, GREEDY, 16, ignore_eos=True)) == text


def test_an_abandoned_answer_counts_what_was_handed_out(engine, plain):
    text = plain(max_tokens=16)
    session = planned(engine, PROMPT + text, PATTERNS["all"], 5)
    answer = session.generate(PROMPT, GREEDY, 16)
    assert [next(answer) for _ in range(3)] == text[:3]
    answer.close()
    assert (session.last.completion_tokens, session.last.finish_reason) == (3, None)


def test_after_an_abandoned_answer_a_session_goes_on_as_a_new_one(engine, plain):
    session = session_of(engine, Speculator("mtp", WidthPolicy(fixed_width=2), mtp_drafter(engine)))
    answer = session.generate(PROMPT, GREEDY, 16)
    next(answer)
    answer.close()
    other = [*PROMPT[:6], 99, 98]
    assert list(session.generate(other, GREEDY, 8)) == plain(other, max_tokens=8)


def test_what_is_cached_is_not_computed_again(engine):
    session = session_of(engine, Speculator("off", WidthPolicy()))
    answer = list(session.generate(PROMPT, GREEDY, 4))
    list(session.generate([*PROMPT, *answer, 9], GREEDY, 2))
    assert session.last.reused_tokens == len(PROMPT) + 3
    list(session.generate(PROMPT, GREEDY, 2))
    assert session.last.reused_tokens == len(PROMPT) - 1


def test_the_multi_token_layer_stays_warm_over_continuations_and_cuts(engine):
    """After any history, drafts are those of a fresh session with the same text."""
    drafter = mtp_drafter(engine)
    session = session_of(engine, Speculator("mtp", WidthPolicy(fixed_width=2), drafter))
    texts = [PROMPT, [*PROMPT[:5], 77, 78], [*PROMPT[:5], 77, 78, 79, 80, 81], PROMPT[:2], [3, 4], PROMPT * 3]
    for text in texts:
        list(session.generate(text, GREEDY, 3))
        continued = [*session.cached_ids, 200, 201]
        list(session.generate(continued, GREEDY, 1))
        fresh_drafter = mtp_drafter(engine)
        list(session_of(engine, Speculator("mtp", WidthPolicy(), fresh_drafter)).generate(continued, GREEDY, 1))
        assert drafter.draft([*continued, 7], 3) == fresh_drafter.draft([*continued, 7], 3)


def test_a_failed_pass_leaves_the_session_as_it_was(engine, plain, monkeypatch):
    text = plain(max_tokens=12)
    session = planned(engine, PROMPT + text, PATTERNS["random"], 3)
    answer = session.generate(PROMPT, GREEDY, 12)
    next(answer)

    def fail(*arguments):
        raise CheckpointError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "lease", fail)
        with pytest.raises(CheckpointError):
            next(answer)
    assert list(session.generate(PROMPT, GREEDY, 12)) == text


def test_requests_that_cannot_be_answered_are_refused_at_once(engine):
    session = session_of(engine, Speculator("off", WidthPolicy()))
    with pytest.raises(RequestError, match="no tokens"):
        session.generate([], GREEDY)
    with pytest.raises(RequestError, match="token id 320 is outside the vocabulary of 320"):
        session.generate([1, 320], GREEDY)
    with pytest.raises(RequestError, match="the context holds 64"):
        session.generate([1] * 64, GREEDY)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        session.generate([1], GREEDY, 0)
