"""The scheduler over a toy model whose tokens depend on every cached row, and over the demo."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from asking import CONTEXT, GREEDY, Answer, P, ask, prompt, run
from toy_model import LAYOUT, ToyModel
from waiting import LONG_S, wait_until

from glm_gpu.engine import Engine
from glm_gpu.errors import CheckpointError, OverloadedError, RequestError
from glm_gpu.model.transformer import cache_layout
from glm_gpu.pages import PagePool
from glm_gpu.sampling import SamplingParams
from glm_gpu.scheduler import Scheduler


@pytest.fixture
def make():
    """make(num_pages=128, **options) -> a scheduler that is stepped by hand; no page may be lost at the end."""
    pools, schedulers = [], []

    def call(num_pages=128, model=None, **options):
        pools.append(PagePool(LAYOUT, num_pages * P))
        schedulers.append(Scheduler(model or ToyModel(), pools[-1], min(CONTEXT, num_pages * P), **options))
        return schedulers[-1]

    yield call
    for scheduler, pool in zip(schedulers, pools, strict=True):
        assert scheduler.num_running == scheduler.num_queued == 0
        assert pool.num_free + scheduler.tree.num_pages == pool.num_pages
        scheduler.tree.clear()
        assert pool.num_free == pool.num_pages
        pool.close()


def test_every_answer_is_the_one_its_request_gets_alone(make):
    scheduler = make(max_running=5, max_rows=37)
    prompts = [prompt(length, length) for length in (1, 2, 3, 40, P, P + 1, 300, 5, 150)]
    answers = run(scheduler, *(ask(ids, 3 + i) for i, ids in enumerate(prompts)))
    model = ToyModel()
    for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.ids == model.answer(ids, 3 + i)
        assert (answer.result.finish_reason, answer.result.completion_tokens) == ("length", 3 + i)
    assert scheduler.counts.passes < sum(len(a.ids) for a in answers)


def test_a_seeded_draw_does_not_depend_on_company(make):
    params = SamplingParams(temperature=1.0, seed=7)
    (alone,) = run(make(), ask(prompt(9, 1), 20, params=params))
    beside = run(make(), *(ask(prompt(n, n), 20, params=SamplingParams(seed=n)) for n in range(2, 6)),
                 ask(prompt(9, 1), 20, params=params))  # fmt: skip
    assert beside[-1].ids == alone.ids


def test_running_answers_get_a_token_in_every_pass_while_a_long_prompt_is_computed(make):
    scheduler = make(max_rows=64)
    first, second = Answer(), Answer()
    scheduler.submit(ask(prompt(4, 1), 1200), first)  # on a busy machine a pass may take but a row of the prompt
    scheduler.step()
    scheduler.submit(ask(prompt(1000, 2), 1), second)
    while not second.tokens:
        before = len(first.tokens)
        scheduler.step()
        assert len(first.tokens) == before + 1
    assert second.progress[0][0] < 1000 and second.progress[-1] == (1000, 1000)
    while scheduler.step():
        pass


def test_a_short_prompt_passes_a_long_one_but_a_long_one_is_not_starved(make):
    scheduler = make(max_rows=64, max_running=4)
    long, order = Answer(), []
    long.ended = lambda result: order.append("long")
    scheduler.submit(ask(prompt(1500, 0), 1), long)
    scheduler.step()
    for n in range(400):
        short = Answer()
        short.ended = lambda result, n=n: order.append(n)
        scheduler.submit(ask(prompt(60, n + 1), 1), short)
        scheduler.step()
    while scheduler.step():
        pass
    assert order[0] == 0
    assert 10 < order.index("long") < 40  # 1,500 rows of others at 60 each, and no more


def test_beginnings_are_computed_once_and_at_least_the_last_token_again(make):
    """C42."""
    scheduler, model = make(), ToyModel()
    ids = prompt(3 * P + 5, 1)
    for question in (ids, ids, ids[: 2 * P], ids[: P + 3], [*ids[:-1], 63 - ids[-1]], [*ids, 1, 2]):
        (answer,) = run(scheduler, ask(question, 6))
        assert answer.ids == model.answer(question, 6)
    assert scheduler.counts.reused_tokens == len(ids) - 1 + 2 * P - 1 + P + 2 + len(ids) - 1 + len(ids)


def test_the_last_row_of_a_prompt_is_a_prompt_s_row_even_alone(make):
    scheduler, ids = make(), prompt(40, 1)
    run(scheduler, ask(ids, 6))
    rows = scheduler.counts.prompt_rows, scheduler.counts.answer_rows
    assert rows == (40, 5)
    (again,) = run(scheduler, ask(ids, 6))  # all but its last token is cached
    assert again.progress == [(40, 40)]
    assert (scheduler.counts.prompt_rows, scheduler.counts.answer_rows) == (40 + 1, 5 + 5)


def test_requests_that_come_together_share_their_beginning_too(make):
    scheduler = make()
    ids = prompt(5 * P, 1)
    answers = run(scheduler, *(ask(ids, 4, params=SamplingParams(seed=n)) for n in range(4)))
    assert [answer.result.reused_tokens for answer in answers] == [0, *[5 * P - 1] * 3]


def test_a_full_pool_makes_the_latest_wait_and_changes_no_answer(make):
    scheduler = make(num_pages=8, max_rows=50)
    prompts = [prompt(2 * P + n, n) for n in range(6)]
    answers = run(scheduler, *(ask(ids, 3 * P) for ids in prompts))
    model = ToyModel()
    assert [answer.ids for answer in answers] == [model.answer(ids, 3 * P) for ids in prompts]
    assert scheduler.counts.preempted > 0


def test_cancelled_requests_end_before_the_next_pass_in_every_phase(make):
    """C39."""
    scheduler = make(max_rows=16, max_running=2)
    decoding, prefilling, queued = Answer(), Answer(), Answer()
    jobs = [scheduler.submit(ask(prompt(4, 1), 100), decoding)]
    scheduler.step()
    jobs.append(scheduler.submit(ask(prompt(500, 2), 100), prefilling))
    jobs.append(scheduler.submit(ask(prompt(600, 3), 100), queued))
    while not prefilling.progress:  # how long a pass lasts without a prompt is measured first
        scheduler.step()
    assert prefilling.progress and not prefilling.tokens and scheduler.num_queued == 1
    for job, answer in zip(jobs, (decoding, prefilling, queued), strict=True):
        job.cancel()
        before = len(answer.tokens)
        scheduler.step()
        assert answer.result.finish_reason == "cancelled" and len(answer.tokens) == before
    assert not scheduler.step()
    assert scheduler.counts.ended["cancelled"] == 3


def test_a_full_queue_refuses_and_recovers(make):
    scheduler = make(max_queued=2)
    answers = [Answer() for _ in range(3)]
    scheduler.submit(ask([1]), answers[0])
    scheduler.submit(ask([2]), answers[1])
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        scheduler.submit(ask([3]), answers[2])
    scheduler.step()
    scheduler.submit(ask([3]), answers[2])
    while scheduler.step():
        pass
    assert all(answer.result.finish_reason == "length" for answer in answers)
    assert scheduler.counts.refused == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([]), "no tokens"),
        (ask([1, 64]), "64 is outside the vocabulary of 64"),
        (ask([-1]), "-1 is outside"),
        (ask([1], logit_bias={99: 1.0}), "99 is outside"),
        (ask([1] * (CONTEXT - 7)), f"context holds {CONTEXT}"),
        (ask([1], -1), "context"),
    ],
)
def test_impossible_requests_are_refused_at_once(make, request_, message):
    scheduler = make()
    with pytest.raises(RequestError, match=message):
        scheduler.submit(request_, Answer())


def test_an_answer_may_fill_the_context_to_the_last_position(make):
    scheduler = make(num_pages=2)
    (answer,) = run(scheduler, ask(prompt(2 * P - 10, 1), 10))
    assert len(answer.ids) == 10 and answer.ids == ToyModel().answer(prompt(2 * P - 10, 1), 10)


def test_a_deadline_ends_queued_and_running_requests(make, monkeypatch):
    scheduler, now = make(max_running=1), [0.0]
    monkeypatch.setattr("glm_gpu.jobs.time", SimpleNamespace(monotonic=lambda: now[0]))
    running, queued = Answer(), Answer()
    scheduler.submit(ask([1], 1000, deadline_s=0.05), running)
    scheduler.submit(ask([2], 1000, deadline_s=0.005), queued)
    while scheduler.step():
        now[0] += 0.01
    for answer in (running, queued):
        assert isinstance(answer.result.error, OverloadedError) and "deadline" in str(answer.result.error)
    assert running.tokens and not queued.tokens


@pytest.mark.parametrize("error", [CheckpointError("expert 3 of layer 1 cannot be read"), OSError(5, "I/O error")])
def test_a_read_error_ends_only_the_request_that_needed_the_expert(make, error):
    model = ToyModel()

    def needs_expert(batch):
        if 13 in batch.token_ids and len(model.batches) > 2:
            raise error

    model.before_pass = needs_expert
    model.choose = lambda ids: 13 if ids[:2] == [7, 7] and len(ids) == 6 else sum(ids) % 11 + 20
    scheduler = make(model=model)
    good, bad, other = run(scheduler, ask([1, 2, 3], 12), ask([7, 7], 12), ask([4], 12))
    assert bad.result.error is error and bad.ids[-1] == 13
    assert good.ids == model.answer([1, 2, 3], 12) and other.ids == model.answer([4], 12)
    assert scheduler.counts.ended == {"stop": 0, "length": 2, "cancelled": 0, "error": 1}


@pytest.mark.parametrize("num_failures", [1, 2, 3, 4])
def test_a_failed_allocation_is_retried_after_experts_gave_memory_back(make, num_failures):
    """C26. Failure 1: the pass is cut into single requests. 2: one is repeated. 3: it ends, and the other goes on."""
    model, left = ToyModel(), [num_failures]

    def allocate(batch):
        if len(model.batches) == 3 and left[0]:
            left[0] -= 1
            raise MemoryError

    model.before_pass = allocate
    scheduler = make(model=model)
    first, second = run(scheduler, ask([1, 2], 12), ask([3, 4, 5], 12))
    reasons = [answer.result.finish_reason for answer in (first, second)]
    assert reasons == (["length", "length"] if num_failures < 3 else ["error", "length"])
    assert second.ids == model.answer([3, 4, 5], 12)
    assert model.store.shrunk == {1: 0, 2: 1, 3: 1, 4: 2}[num_failures]
    (after,) = run(scheduler, ask([9], 3))
    assert after.ids == model.answer([9], 3)


def test_a_listener_that_fails_ends_its_own_request_only(make, caplog):
    scheduler = make()
    bad, good = Answer(), Answer()
    bad.token = lambda token: 1 // 0
    scheduler.submit(ask([1, 2]), bad)
    scheduler.submit(ask([3, 4]), good)
    while scheduler.step():
        pass
    assert bad.result.finish_reason == "error" and good.ids == ToyModel().answer([3, 4], 8)
    assert "failed" in caplog.text


def test_end_tokens_and_listeners_stop_an_answer(make):
    scheduler = make()
    expected = ToyModel().answer([5, 6], 8)
    ended, enough = Answer(), Answer(num_wanted=3)
    scheduler.submit(ask([5, 6], eos_ids=frozenset([expected[4]])), ended)
    scheduler.submit(ask([5, 6]), enough)
    while scheduler.step():
        pass
    assert ended.ids == expected[: expected.index(expected[4])] and ended.result.finish_reason == "stop"
    assert enough.ids == expected[:3] and enough.result.finish_reason == "stop"


def test_bias_and_constraint_steer_the_choice_and_log_probabilities_stay_the_model_s(make):
    class Even:
        accepted = ()

        is_complete = False

        def mask(self, logits):
            return np.where(np.arange(64) % 2 == 0, logits, np.float32(-np.inf))

        def push(self, token_id):
            self.accepted += (token_id,)

    even = Even()
    biased, constrained = run(
        make(), ask([1], 5, logit_bias={33: 100.0}, num_logprobs=2), ask([1], 5, constraint=even, num_logprobs=0)
    )
    assert biased.ids == [33] * 5
    assert all(i % 2 == 0 for i in constrained.ids) and list(even.accepted) == constrained.ids
    logits = ToyModel()._logits(np.array([1])).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert biased.tokens[0].logprob == pytest.approx(expected[33])
    assert biased.tokens[0].top[0] == (int(np.argmax(logits)), pytest.approx(expected.max()))
    assert len(biased.tokens[0].top) == 2 and constrained.tokens[0].top == ()


@pytest.mark.parametrize("length", [1, 2, 65, 200])
def test_a_prompt_is_scored_in_full_even_where_it_is_cached(make, length):
    scheduler, ids = make(), prompt(length, 3)
    run(scheduler, ask(ids, 2))
    (answer,) = run(scheduler, ask(ids, 0, scores_prompt=True, num_logprobs=1))
    assert answer.result.finish_reason == "length" and not answer.tokens
    assert [token.id for token in answer.result.prompt] == ids and answer.result.prompt[0].logprob is None
    for n, token in enumerate(answer.result.prompt[1:], 1):
        logits = ToyModel()._logits(np.array(ids[:n])).astype(np.float64)
        assert token.logprob == pytest.approx(logits[token.id] - np.log(np.exp(logits).sum()))


def test_closing_drains_and_then_cancels(make):
    scheduler, short = make(), Answer()
    scheduler._model.before_pass = lambda batch: wait_until(lambda: scheduler._is_closing)
    scheduler.start()
    scheduler.submit(ask([1], 5), short)
    scheduler.close(drain_s=LONG_S)
    assert short.result.finish_reason == "length"
    with pytest.raises(OverloadedError, match="shutting down"):
        scheduler.submit(ask([1]), Answer())
    scheduler, endless = make(), Answer()
    scheduler._model.before_pass, scheduler._model.pass_s = lambda batch: None, 0.002
    scheduler.start()
    scheduler.submit(ask([2], CONTEXT - 1), endless)
    scheduler.close(drain_s=0.01)
    assert endless.result.finish_reason == "cancelled"


def test_submissions_and_cancellations_from_many_threads_all_end(make):
    with make(max_running=6, max_rows=40, num_pages=24) as scheduler:
        failures = []

        def client(seed):
            rng = np.random.default_rng(seed)
            for n in range(12):
                ids, answer = prompt(int(rng.integers(1, 3 * P)), seed * 100 + n), Answer()
                job = scheduler.submit(ask(ids, 20), answer)
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.01)
                    job.cancel()
                if not answer.has_ended.wait(LONG_S):
                    failures.append("no end")
                elif answer.ids != ToyModel().answer(ids, len(answer.ids)):
                    failures.append("other tokens")

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_the_demo_answers_each_of_many_as_it_answers_it_alone():
    with Engine.open() as engine:
        prompts = [engine.tokenizer.encode(text) for text in ("And it came to pass", "To be, or not", "Of man's")]
        session = engine.session()
        alone = [list(session.generate(ids, GREEDY, 6)) for ids in prompts]
        pool = PagePool(cache_layout(engine.config, is_bf16=True), 4096)
        scheduler = Scheduler(engine.model, pool, 256)
        answers = run(scheduler, *(ask(ids, 6, eos_ids=engine.eos_ids) for ids in prompts))
        assert [answer.ids for answer in answers] == alone
        (again,) = run(scheduler, ask(prompts[0], 6, eos_ids=engine.eos_ids))
        assert again.ids == alone[0] and again.result.reused_tokens == len(prompts[0]) - 1
        pool.close()


def test_experts_are_counted_by_what_each_row_of_a_pass_is():
    """An answer goes on while another prompt is computed: its rows are decoded, those beside it prefilled."""
    with Engine.open() as engine:
        heat, layer = engine.store.heat, engine.config.sparse_layers[0]
        tokens = {phase: int(counted[layer]) for phase, counted in heat.tokens.items()}
        uses = {phase: int(counted[layer].sum()) for phase, counted in heat.uses.items()}
        pool = PagePool(cache_layout(engine.config, is_bf16=True), 4096)
        scheduler, first, second = Scheduler(engine.model, pool, 512), Answer(), Answer()
        scheduler.submit(ask(list(range(3, 9)), 40), first)
        while len(first.ids) < 5:
            scheduler.step()
        scheduler.submit(ask(list(range(9, 39)), 2), second)
        while scheduler.step():
            pass
        assert first.result.finish_reason == second.result.finish_reason == "length"
        rows = {"prefill": scheduler.counts.prompt_rows, "decode": scheduler.counts.answer_rows}
        assert rows == {"prefill": 6 + 30, "decode": 39 + 1}
        heat, per_tok = engine.store.heat, engine.config.num_experts_per_tok
        assert {phase: int(counted[layer]) - tokens[phase] for phase, counted in heat.tokens.items()} == rows
        found = {phase: (int(counted[layer].sum()) - uses[phase]) / per_tok for phase, counted in heat.uses.items()}
        assert found == rows
        scheduler.tree.clear()
        pool.close()
