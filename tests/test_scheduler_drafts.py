"""The scheduler's drafts: answers, scores and caches are what they are without any."""

import numpy as np
import pytest
from asking import CONTEXT, GREEDY, Answer, P, ask, prompt, run
from toy_model import LAYOUT, ToyModel

from glm_gpu.engine import Engine
from glm_gpu.errors import CheckpointError
from glm_gpu.model.transformer import cache_layout
from glm_gpu.opening import EngineOptions
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.sampling import SamplingParams
from glm_gpu.scheduler import Scheduler
from glm_gpu.speculative import Draft, Speculator, WidthPolicy

PATTERNS = {
    "all": lambda place: True,
    "none": lambda place: False,
    "two of three": lambda place: place % 3 != 0,
    "random": np.random.default_rng(5).integers(0, 2, CONTEXT + 16).astype(bool).__getitem__,
}


class ToyDrafter:
    """Drafts what the toy model will choose, except where a pattern says otherwise."""

    num_pending, is_ready = 0, True

    def __init__(self, is_right, before_draft):
        self.is_right, self.before_draft = is_right, before_draft
        self.observed_ids, self.skipped = [], 0

    def skip(self, length):
        self.skipped = length

    def observe(self, token_ids, hidden):
        assert len(token_ids) == len(hidden)
        self.observed_ids += token_ids

    def draft(self, ids, width):
        self.before_draft()
        assert ids[self.skipped : -1] == self.observed_ids, "drafts must be wanted behind what was observed"
        known = ToyModel().answer(ids, width)
        return Draft("mtp", [t if self.is_right(len(ids) + n) else (t + 1) % 64 for n, t in enumerate(known)])


@pytest.fixture
def make(monkeypatch):
    """make(pattern, width, num_pages=128, **options) -> a scheduler that drafts; no page may be lost at the end."""
    monkeypatch.setattr(
        "glm_gpu.speculative.speculator.draft_together",
        lambda turns: [drafter.draft(ids, width) for drafter, ids, width in turns],
    )
    made = []

    def call(pattern="random", width=4, num_pages=128, model=None, before_draft=lambda: None, **options):
        pool, policy = PagePool(LAYOUT, num_pages * P), WidthPolicy(fixed_width=width)

        def speculator(max_length):
            return Speculator("mtp", policy, ToyDrafter(PATTERNS[pattern], before_draft))

        context = min(CONTEXT, num_pages * P)
        made.append(Scheduler(model or ToyModel(), pool, context, make_speculator=speculator, **options))
        return made[-1]

    yield call
    for scheduler in made:
        assert scheduler.num_running == scheduler.num_queued == 0
        scheduler.tree.clear()
        assert scheduler.pool.num_free == scheduler.pool.num_pages
        scheduler.pool.close()


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_beside_others_are_those_without_drafts(make, pattern, width):
    scheduler = make(pattern, width, max_running=5, max_rows=50)
    prompts = [prompt(length, length) for length in (1, 2, 40, P, P + 1, 200, 5)]
    answers = run(scheduler, *(ask(ids, 9 + 5 * i) for i, ids in enumerate(prompts)))
    for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.ids == ToyModel().answer(ids, 9 + 5 * i)
        assert (answer.result.finish_reason, answer.result.completion_tokens) == ("length", 9 + 5 * i)
    counts = scheduler.counts
    assert counts.drafted_tokens > 0
    assert {"all": counts.accepted_tokens == counts.drafted_tokens, "none": not counts.accepted_tokens}.get(
        pattern, 0 < counts.accepted_tokens < counts.drafted_tokens
    )


def test_an_answer_whose_drafts_come_true_takes_fewer_passes(make):
    scheduler = make("all", 4)
    (answer,) = run(scheduler, ask(prompt(6, 1), 21))
    assert len(answer.ids) == 21 and scheduler.counts.passes == 1 + 4
    assert scheduler.counts.answer_steps == 4 and scheduler.counts.accepted_tokens == 16


def test_a_cache_that_keeps_rejected_drafts_would_be_noticed(make, monkeypatch):
    """The fault that the other tests must catch, planted."""
    scheduler = make("two of three", 4)
    monkeypatch.setattr(PagedCache, "rewind", lambda cache, length: None)
    (answer,) = run(scheduler, ask(prompt(6, 1), 20))
    assert answer.result.finish_reason == "error" or answer.ids != ToyModel().answer(prompt(6, 1), 20)


def test_a_seeded_draw_does_not_depend_on_drafts(make):
    params = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=7)
    requests = [ask(prompt(9, 1), 30, params=params), ask(prompt(4, 2), 30, params=SamplingParams(seed=3))]
    plain = [answer.ids for answer in run(make("none", 1), *requests)]
    assert [answer.ids for answer in run(make("random", 5), *requests)] == plain


def test_beginnings_are_shared_behind_drafts_and_hold_no_rejected_one(make):
    scheduler = make("two of three", 6)
    ids = prompt(2 * P + 5, 1)
    (first,) = run(scheduler, ask(ids, P))
    grown = ids + first.ids
    questions = (ids, grown, grown[:-3], [*grown[:-7], 63 - grown[-7]], [*grown, 1, 2])
    for question in questions:
        (answer,) = run(scheduler, ask(question, 12))
        assert answer.ids == ToyModel().answer(question, 12)
        assert answer.result.reused_tokens >= min(len(question), len(grown)) - 8


def test_a_full_pool_preempts_and_changes_no_answer(make):
    scheduler = make("random", 8, num_pages=8, max_rows=50)
    prompts = [prompt(2 * P + n, n) for n in range(6)]
    answers = run(scheduler, *(ask(ids, 2 * P) for ids in prompts))
    assert [answer.ids for answer in answers] == [ToyModel().answer(ids, 2 * P) for ids in prompts]
    assert scheduler.counts.preempted > 0


@pytest.mark.parametrize("place", range(1, 8))
def test_an_end_inside_an_accepted_draft_is_where_it_is_without(make, place):
    ids = prompt(5, 2)
    expected = ToyModel().answer(ids, 12)
    scheduler = make("all", 8)
    ended, enough = Answer(), Answer(num_wanted=place)
    scheduler.submit(ask(ids, eos_ids=frozenset([expected[place]]), num_logprobs=0), ended)
    scheduler.submit(ask(ids), enough)
    scheduler.submit(ask(ids, place), long := Answer())
    while scheduler.step():
        pass
    end = expected.index(expected[place])
    assert ended.ids == expected[:end] and ended.result.finish_reason == "stop"
    assert ended.result.end_token.id == expected[place] and ended.result.completion_tokens == end
    assert enough.ids == expected[:place] and enough.result.finish_reason == "stop"
    assert long.ids == expected[:place] and long.result.finish_reason == "length"
    (again,) = run(scheduler, ask(ids + expected[:9], 3))
    assert again.ids == ToyModel().answer(ids + expected[:9], 3)


def test_a_cancelled_answer_ends_between_two_passes_of_drafts(make):
    scheduler = make("all", 4)
    answer, other = Answer(), Answer()
    job = scheduler.submit(ask(prompt(4, 1), 100), answer)
    scheduler.submit(ask(prompt(7, 1), 30), other)
    for _ in range(3):
        scheduler.step()
    before = len(answer.tokens)
    job.cancel()
    scheduler.step()
    assert answer.result.finish_reason == "cancelled" and len(answer.tokens) == before > 5
    while scheduler.step():
        pass
    assert other.ids == ToyModel().answer(prompt(7, 1), 30)


def test_log_probabilities_are_those_without_drafts(make):
    requests = [
        ask(prompt(9, 1), 20, num_logprobs=3, logit_bias={5: 2.0}),
        ask(prompt(70, 1), 9, num_logprobs=1, scores_prompt=True),
    ]
    plain, drafted = run(make("none", 1), *requests), run(make("two of three", 5), *requests)
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens == other.tokens and one.result.prompt == other.result.prompt


def test_no_guesses_beside_rows_of_prompts_and_no_pass_beyond_its_bound(make):
    model = ToyModel()
    scheduler = make("all", 8, model=model, max_rows=24)
    answers = [Answer() for _ in range(8)]
    for n in range(5):
        scheduler.submit(ask(prompt(4 + n, n), 60), answers[n])
    for _ in range(8):
        scheduler.step()
    for n in range(5, 8):
        scheduler.submit(ask(prompt(100, n), 60), answers[n])
    while scheduler.step():
        pass
    assert max(sum(rows) for rows in model.batches) <= 24 + 8
    assert any(sum(rows) > len(rows) > 4 for rows in model.batches[8:])
    for n, answer in enumerate(answers):
        assert answer.ids == ToyModel().answer(prompt(4 + n if n < 5 else 100, n), 60)


@pytest.mark.parametrize("error", [CheckpointError("expert 3 of layer 6 cannot be read"), MemoryError()])
def test_a_drafter_that_fails_is_left_out_and_the_answer_goes_on(make, error, caplog):
    left = [3]

    def before_draft():
        left[0] -= 1
        if left[0] == 0:
            raise error

    first, second = run(make("all", 2, before_draft=before_draft), ask([1, 2], 20), ask([3], 20))
    assert first.ids == ToyModel().answer([1, 2], 20) and second.ids == ToyModel().answer([3], 20)
    assert "drafting failed" in caplog.text


def test_a_failed_pass_with_drafts_is_repeated_for_each_alone(make):
    model = ToyModel()

    def fail_together(batch):
        if len(batch.spans) > 1 and len(model.batches) > 4:
            raise OSError(5, "I/O error")

    model.before_pass = fail_together
    first, second = run(make("random", 3, model=model), ask([1, 2], 30), ask([3], 30))
    assert first.ids == model.answer([1, 2], 30) and second.ids == model.answer([3], 30)


def test_an_implausible_acceptance_is_logged_once(make, caplog):
    run(make("none", 2), *(ask(prompt(5, n), 90) for n in range(4)))
    assert caplog.text.count("of 128 multi-token (MTP) guesses") + caplog.text.count("guesses came true") == 1


@pytest.mark.parametrize("speculate", ["auto", "mtp", "ngram"])
def test_the_demo_answers_each_of_many_with_drafts_as_it_answers_it_alone(speculate):
    with Engine.open(None, EngineOptions(context=256, speculate=speculate)) as engine:
        texts = ("And it came to pass in those days", "To be, or not to be, that is", "And God said, And God said,")
        prompts = [engine.tokenizer.encode(text) for text in texts]
        plain = Scheduler(engine.model, PagePool(cache_layout(engine.config, is_bf16=True), 4096), 256)
        params = [GREEDY, SamplingParams(temperature=0.9, seed=1), GREEDY]
        requests = [ask(ids, 40, params=p) for ids, p in zip(prompts, params, strict=True)]
        alone = [run(plain, request)[0].ids for request in requests]
        engine.speculation = WidthPolicy(fixed_width=3)
        pool = PagePool(cache_layout(engine.config, is_bf16=True), 4096)
        scheduler = Scheduler(engine.model, pool, 256, make_speculator=engine.speculator)
        answers = run(scheduler, *requests)
        assert [answer.ids for answer in answers] == alone
        assert scheduler.counts.accepted_tokens > 0
        for used in (plain, scheduler):
            used.tree.clear()
            used.pool.close()
