"""`run --profile`: seconds land on the part that took them, and add up to the answer's wall time."""

import json
import os
import time

import pytest

from glm_gpu import pass_profile
from glm_gpu.engine import Engine
from glm_gpu.kernels import clock, cpu
from glm_gpu.opening import EngineOptions
from glm_gpu.pass_profile import profile_document, profiled
from glm_gpu.sampling import SamplingParams
from glm_gpu.tiers import files

PROMPT, NUM_TOKENS = [500, 259, 429], 6
NAP_S = 0.004
needs_extension = pytest.mark.skipif(cpu.active is None, reason="kernels are told apart from Python in the extension")


class SlowKernel:
    """The extension with one kernel that takes a second, on a clock that nothing else moves."""

    def __init__(self, extension, name: str) -> None:
        self.now = 0.0
        self._extension, self._name = extension, name

    def perf_counter(self) -> float:
        return self.now

    def __getattr__(self, name: str):
        function = getattr(self._extension, name)
        if name != self._name:
            return function

        def slow(*arguments):
            self.now += 1.0
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
        # experts that are still on their way would be computed in calls of their own, and make the next layer's guessed
        while any(tier.name == "disk" and tier.num_experts for tier in engine.store.report()):
            engine.store.begin_pass("prefill")
            time.sleep(0.01)
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
    ("kernel", "part"),
    [("attend_absorbed", "attention"), ("route", "router"), ("expert_ffn", "experts"), ("mlp", "shared expert")],
)
def test_the_time_of_a_kernel_is_its_parts_and_no_others(engine, monkeypatch, kernel, part):
    slow = SlowKernel(cpu.active, kernel)
    monkeypatch.setattr(cpu, "active", slow)
    for module in (pass_profile, clock):
        monkeypatch.setattr(module, "time", slow)
    with profiled(engine) as phases:
        list(engine.session().generate(PROMPT, SamplingParams(temperature=0.0), NUM_TOKENS, ignore_eos=True))
    found = phases["decode"]
    num_dense = engine.config.num_hidden_layers - len(engine.config.sparse_layers)
    layers = {"attention": engine.config.num_hidden_layers}.get(part, len(engine.config.sparse_layers))
    wanted = {part: float(found.num_passes * layers)}
    if kernel == "mlp":
        wanted["MLP"] = float(found.num_passes * num_dense)
    assert {name: part_s for name, part_s in found.kernel_s.items() if part_s} == wanted
    assert (found.wait_s, found.python_s, found.pass_s) == (0.0, 0.0, sum(wanted.values()))


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
