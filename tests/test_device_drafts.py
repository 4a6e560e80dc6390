"""The multi-token layer on simulated devices: the CPU's guesses, the same answer, the same bits in every placement."""

import numpy as np
import pytest
from asking import ask, run
from device_models import greedy, needs, on_devices, options_for

from glm_gpu.batch import Batch
from glm_gpu.engine import Engine
from glm_gpu.model.device_mtp import DeviceMtpHead
from glm_gpu.model.device_transformer import DeviceTransformer
from glm_gpu.model.indexer import Selection
from glm_gpu.model.transformer import cache_layout
from glm_gpu.pages import PagePool
from glm_gpu.sampling import SamplingParams
from glm_gpu.scheduler import Scheduler
from glm_gpu.speculative import MtpDrafter

# Past `index_topk` of the model, 16, so that the indexer selects.
NUM_ROWS = 20
# A logit of 16-bit activations differs from the CPU's by this share of the largest one where both choose alike.
NOISE = 0.04


@pytest.fixture(scope="module")
def path(oracle_dir):
    return oracle_dir / "tiny_glm"


def open_engine(path, placement: str = "cpu", **changes) -> Engine:
    """With the multi-token layer, everything at hand or six experts of a size on each device."""
    if placement != "cpu":
        need = needs(path)
        whole = need.kept_bytes + need.pass_bytes
        sizes = {
            "one": [1 << 30],
            "two": [whole + 40 * need.slot_bytes] * 2,
            "few": [whole + need.kept_bytes // 2 + 14 * need.slot_bytes],
            # so that embedding and head are on another device than the layer
            "apart": [whole + 50 * need.slot_bytes, need.kept_bytes // 3 + need.pass_bytes + 4 * need.slot_bytes],
        }
        changes["devices"] = on_devices(*sizes[placement])
    return Engine.open(path, options_for(path, **{"speculate": "mtp"} | changes))


@pytest.fixture(scope="module")
def pairs(path):
    """Tokens, and hidden states of the positions before them."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 200, NUM_ROWS + 1).tolist()
    with open_engine(path) as engine:
        cache = engine.model.new_cache(64, is_bf16=True)
        hidden = engine.model.forward(Batch.of([(ids[:-1], cache)], "prefill")).hidden
    return ids[1:], hidden


def guessed(engine: Engine, pairs, given=None) -> np.ndarray:
    """Logits of a prompt's rows, then of one more row over what is given or selected."""
    (ids, hidden), head = pairs, engine.mtp_head
    cache = head.new_cache(64, is_bf16=True)
    first, _ = head.forward(Batch.of([(ids, cache)], "prefill", all_logits=True), hidden)
    second, _ = head.forward(Batch.of([([7], cache)], "decode"), hidden[-1:], given)
    return np.concatenate([first.logits, second.logits])


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    noise = NOISE * np.abs(expected).max()
    best = np.sort(expected, axis=1)
    is_clear = best[:, -1] - best[:, -2] > noise
    assert is_clear.any()
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[is_clear].all()
    assert np.median(np.abs(found - expected)) < noise / 8


def test_guesses_are_the_cpu_s_in_every_placement(path, pairs):
    with open_engine(path) as engine:
        expected = guessed(engine, pairs)
    with open_engine(path, "one") as engine:
        found = guessed(engine, pairs)
        assert_near(found, expected)
    for placement, ordinal in (("two", 1), ("few", 0), ("apart", 0)):
        with open_engine(path, placement) as engine:
            assert np.array_equal(guessed(engine, pairs), found), placement
            assert engine.mtp_head._part.device.info.ordinal == ordinal
            assert (engine.mtp_head._part is engine.model.ends) == (placement != "apart")


@pytest.mark.parametrize(
    "given",
    [
        [Selection(np.array([[0, 2, 3, 11, 20]], np.int32), np.array([5], np.int32))],
        [Selection(None, np.array([4], np.int32))],
    ],
)
def test_a_row_attends_over_what_it_is_given(path, pairs, given):
    with open_engine(path) as engine:
        expected, own = guessed(engine, pairs, given)[-1], guessed(engine, pairs)[-1]
    apart = np.abs(own - expected).max()
    for placement in ("one", "apart"):
        with open_engine(path, placement) as engine:
            assert np.abs(guessed(engine, pairs, given)[-1] - expected).max() < apart / 4


def test_rows_after_drafts_are_those_of_a_fresh_pass(path, pairs):
    ids, hidden = pairs
    with open_engine(path, "one") as engine:
        drafter = MtpDrafter(engine.mtp_head, engine.context, is_bf16=True, shares_selection=True)
        drafter.observe(ids[:17], hidden[:17])
        for stop in (17, 18):
            assert len(drafter.draft(ids[: stop + 1], 3).token_ids) == 3
            drafter.observe(ids[stop : stop + 1], hidden[stop : stop + 1])
        num_rows = drafter.cache.length
        rows = [drafter.cache.read(0, stream, num_rows) for stream in ("latent", "index_key")]
        del drafter
        cache = engine.mtp_head.new_cache(engine.context, is_bf16=True)
        engine.mtp_head.forward(Batch.of([(ids[1 : num_rows + 1], cache)], "prefill"), hidden[:num_rows])
        for stream, expected in zip(("latent", "index_key"), rows, strict=True):
            assert np.array_equal(cache.read(0, stream, num_rows), expected)


def test_an_answer_is_the_same_with_drafts_and_drafts_are_the_same_in_every_placement(path, monkeypatch):
    drafted, forward = [], DeviceMtpHead.forward

    def spy(self, *args):
        output, selections = forward(self, *args)
        assert output.logits is None  # only ids cross the link
        drafted.append(output.best_ids.tolist())
        return output, selections

    monkeypatch.setattr(DeviceMtpHead, "forward", spy)
    prompt_ids, greedy = np.random.default_rng(3).integers(0, 200, NUM_ROWS).tolist(), SamplingParams(temperature=0.0)
    found = {}
    for placement, speculate in (("one", "off"), ("one", "mtp"), ("few", "mtp"), ("apart", "mtp")):
        drafted.clear()
        with open_engine(path, placement, speculate=speculate) as engine:
            if placement == "few":
                engine.store._links = None  # so that experts are copied
            session = engine.session()
            found[placement, speculate] = list(session.generate(prompt_ids, greedy, 6, ignore_eos=True)), drafted.copy()
            assert (session.last.drafted_tokens > 0) == (speculate == "mtp")
            if (placement, speculate) == ("one", "mtp"):
                assert engine.model.chains[1].num_graphs >= 1
            if placement == "few":
                assert engine.model.chains[1].num_graphs == 0
    plain, _ = found.pop(("one", "off"))
    assert len(plain) == 6 and all(answer == plain for answer, _ in found.values())
    assert len({str(drafts) for _, drafts in found.values()}) == 1


def test_c26_a_draft_s_pass_as_long_as_the_context_fits_beside_experts_that_fill_the_memory(path, caplog):
    with open_engine(path, "few") as engine:
        num_rows = engine.context
        hidden = np.random.default_rng(1).standard_normal((num_rows, engine.config.hidden_size)).astype(np.float32)
        cache = engine.mtp_head.new_cache(engine.context, is_bf16=True)
        output, _ = engine.mtp_head.forward(Batch.of([(range(num_rows), cache)], "prefill", all_logits=True), hidden)
        assert np.isfinite(output.logits).all()
    assert not caplog.records  # nothing was given back


def test_where_the_best_token_is_wanted_its_id_alone_comes_from_a_device(path, monkeypatch):
    prompt_ids = np.random.default_rng(3).integers(0, 200, NUM_ROWS).tolist()
    outputs, forward = [], DeviceTransformer.forward
    with open_engine(path, "one", speculate="off") as engine:
        expected, _ = greedy(engine, prompt_ids, 4)
        monkeypatch.setattr(
            DeviceTransformer, "forward", lambda self, batch: outputs.append(forward(self, batch)) or outputs[-1]
        )
        for is_best, params in (
            (True, SamplingParams(temperature=0.0)),
            (False, SamplingParams(temperature=0.0, repetition_penalty=1.0001)),
            (False, SamplingParams(temperature=1e-20)),
        ):
            outputs.clear()
            assert list(engine.session().generate(prompt_ids, params, 4, ignore_eos=True)) == expected
            assert len(outputs) == 4 and all((output.logits is None) == is_best for output in outputs)


def test_sequences_of_a_server_draft_together_on_a_device(path):
    options = {"num_contexts": 2, "is_shared": True}
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    answers = {}
    for speculate in ("off", "mtp"):
        with open_engine(path, "one", speculate=speculate, **options) as engine:
            pool = PagePool(cache_layout(engine.config, True), 4 * engine.context)
            speculator = engine.speculator if speculate == "mtp" else None
            scheduler = Scheduler(engine.model, pool, engine.context, 2, max_rows=16, make_speculator=speculator)
            scored = ask(prompts[1], 4, num_logprobs=1)  # wants logits, where the other wants the best token alone
            found = [*run(scheduler, ask(prompts[0], 4), scored), *run(scheduler, *(ask(ids, 4) for ids in prompts))]
            answers[speculate] = [answer.ids for answer in found]
            assert all(token.top[0][0] == token.id for token in found[1].tokens)
            (biased,) = run(scheduler, ask(prompts[1], 2, logit_bias={5: 1e6}))
            assert biased.ids == [5, 5]
            assert answers[speculate][:2] == answers[speculate][2:]
            assert (scheduler.counts.drafted_tokens > 0) == (speculate == "mtp")
            scheduler.tree.clear()
            pool.close()
    assert answers["mtp"] == answers["off"]


def test_auto_takes_the_layer_where_every_expert_is_at_hand(path):
    with open_engine(path, "one", speculate="auto") as engine:
        assert engine.mtp_head is not None
    need = needs(path)
    devices = on_devices(need.kept_bytes + need.pass_bytes + 10 * need.slot_bytes)
    with Engine.open(path, options_for(path, speculate="auto", expert_slots=1, devices=devices)) as engine:
        assert engine.mtp_head is None
