"""`run --profile`: seconds land on the part that took them, and add up to the answer's wall time."""

import json
import os
import time

import pytest

from glm_gpu import pass_profile
from glm_gpu.engine import Engine
from glm_gpu.kernels import cpu
from glm_gpu.opening import EngineOptions
from glm_gpu.pass_profile import profile_document, profiled
from glm_gpu.sampling import SamplingParams
from glm_gpu.tiers import files

PROMPT, NUM_TOKENS = [500, 259, 429], 6
NAP_S = 0.004
needs_extension = pytest.mark.skipif(cpu.active is None, reason="kernels are told apart from Python in the extension")


class SlowKernel:
    """The extension with one kernel that naps first."""

    def __init__(self, extension, name: str) -> None:
        self._extension, self._name = extension, name

    def __getattr__(self, name: str):
        function = getattr(self._extension, name)
        if name != self._name:
            return function

        def slow(*arguments):
            time.sleep(NAP_S)
            return function(*arguments)

        return slow


def answer(engine: Engine) -> tuple[list[int], dict]:
    """An answer's tokens, and its profile."""
    with profiled(engine) as phases:
        session = engine.session()
        ids = list(session.generate(PROMPT, SamplingParams(temperature=0.0), NUM_TOKENS, ignore_eos=True))
    return ids, profile_document(phases, session.last)


@pytest.fixture
def engine():
    with Engine.open(None, EngineOptions(context=64, speculate="off")) as engine:
        yield engine


def test_lines_add_up_to_the_wall_time_of_each_phase(engine):
    began = time.perf_counter()
    _, found = answer(engine)
    elapsed = time.perf_counter() - began
    assert [*found] == ["prefill", "decode"]
    assert [(phase["tokens"], phase["passes"]) for phase in found.values()] == [
        (3, 1),
        (NUM_TOKENS - 1, NUM_TOKENS - 1),
    ]
    for phase in found.values():
        assert all(line_s > 0 for line_s in phase["seconds"].values())
        assert sum(phase["seconds"].values()) == pytest.approx(phase["wall_s"])
    assert sum(phase["wall_s"] for phase in found.values()) <= elapsed


@needs_extension
@pytest.mark.parametrize(
    ("kernel", "line"),
    [("attend_latent", "attention"), ("route", "router"), ("expert_ffn", "experts"), ("mlp", "shared expert")],
)
def test_a_slow_kernel_shows_on_its_part_alone(engine, monkeypatch, kernel, line):
    plain = answer(engine)[1]["decode"]["seconds"]
    monkeypatch.setattr(cpu, "active", SlowKernel(cpu.active, kernel))
    slow = answer(engine)[1]["decode"]["seconds"]
    naps_s = NAP_S * (NUM_TOKENS - 1) * len(engine.config.sparse_layers)
    grown = {name: slow[name] - plain.get(name, 0.0) for name in slow}
    assert sum(grown_s for name, grown_s in grown.items() if name.startswith(line)) > 0.9 * naps_s
    assert max(grown_s for name, grown_s in grown.items() if not name.startswith(line)) < 0.5 * naps_s


def test_waiting_for_a_slow_disk_is_waiting(monkeypatch):
    def slow_preadv(*arguments):
        time.sleep(NAP_S)
        return os.preadv(*arguments)

    monkeypatch.setattr(files.ExpertFiles.__init__, "__defaults__", ("buffered", slow_preadv))
    options = EngineOptions(context=64, speculate="off", prefetch="off", expert_slots=8)
    with Engine.open(None, options) as engine:
        seconds = answer(engine)[1]["decode"]["seconds"]
    assert seconds["waiting for reads"] > NAP_S * (NUM_TOKENS - 1)
    assert any(name in seconds for name in ("experts read on demand", "experts read ahead, late"))


def test_the_answer_is_the_same_and_afterwards_nothing_is_timed(engine):
    model, extension = engine.model, cpu.active
    ids, _ = answer(engine)
    assert engine.model is model and cpu.active is extension
    session = engine.session()
    assert list(session.generate(PROMPT, SamplingParams(temperature=0.0), NUM_TOKENS, ignore_eos=True)) == ids


def test_run_prints_the_profile_beside_the_answer(invoke):
    words = ("run", "And it came to pass", "--max-tokens", 6, "--temperature", 0)
    plain = invoke(*words)[1]
    code, out, err = invoke(*words, "--profile")
    assert (code, out) == (0, plain)
    assert "decode: 5 tokens in" in err and "between passes" in err and "attention" in err
    found = json.loads(invoke(*words, "--profile", "--json")[1])["profile"]
    assert found.keys() == {"prefill", "decode"}
    assert "profile" not in json.loads(invoke(*words, "--json")[1])


def test_on_numpy_parts_hold_all_of_their_time(engine):
    with cpu.use("numpy"):
        seconds = answer(engine)[1]["decode"]["seconds"]
    assert "Python within passes" not in seconds and seconds["attention"] > 0
    assert pass_profile.PARTS[1] == "attention"


def test_a_model_on_devices_is_not_profiled_and_the_message_says_what_to_do(invoke):
    code, out, err = invoke("run", "And", "--max-tokens", 1, "--device", "sim:1", "--profile")
    assert (code, out) == (2, "") and "--device cpu" in err
