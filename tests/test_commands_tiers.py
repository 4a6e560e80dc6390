"""plan, status and replay as a user meets them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

from glm_gpu.engine import Engine
from glm_gpu.opening import EngineOptions
from glm_gpu.options import state_folder
from glm_gpu.sampling import SamplingParams
from glm_gpu.status import publisher
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.heat_file import HeatFile
from glm_gpu.tiers.live import live_engines
from glm_gpu.tiers.replay import learned
from glm_gpu.tiers.trace import read_trace

TRACES = Path(__file__).parent / "data" / "traces"


def test_plan_shows_parts_that_add_up_tiers_and_a_map(invoke, oracle_dir):
    code, out, _ = invoke("plan", "--model", oracle_dir / "tiny_glm", "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(found["parts"].values()) == found["ram_bytes"] <= found["budget"]["ram_bytes"]
    assert sum(tier["num_experts"] for tier in found["tiers"]) == 16 * len(found["map"])
    code, out, _ = invoke("plan", "--model", oracle_dir / "tiny_glm", "--expert-slots", 12)
    assert code == 0 and "12 expert slots" in out
    assert max(map(len, out.split("\n\n")[1].splitlines())) <= 80


def test_plan_refuses_with_numbers_what_does_not_fit(invoke, oracle_dir):
    code, out, err = invoke("plan", "--model", oracle_dir / "tiny_glm", "--ram", "1MiB")
    assert code == 1 and not out
    assert "needs at least" in err and "1.00 MiB may be used (--ram)" in err and err.count("\n") == 1


def test_plan_goes_by_the_heat_that_earlier_runs_left(invoke, oracle_dir):
    with Engine.open(oracle_dir / "tiny_glm", EngineOptions(context=64)) as engine:
        fingerprint, config = engine.checkpoint.fingerprint, engine.config
    heat = Heat(config.num_hidden_layers + 1, config.n_routed_experts)
    for _ in range(200):
        heat.count(config.sparse_layers[0], np.array([[3, 5, 7, 9]]), "decode")
    HeatFile(state_folder(), fingerprint).save(heat)
    _, out, _ = invoke("plan", "--model", oracle_dir / "tiny_glm", "--expert-slots", 4, "--json")
    first = json.loads(out)["map"][0]
    assert [n for n, tier in enumerate(first["tiers"]) if tier in "12"] == [3, 5, 7, 9]


def engine_document(fingerprint: str, num_decoded: int) -> dict:
    """What the engine of a model publishes once it has decoded so many tokens."""
    return wait_until(
        lambda: next(
            (d for d in live_engines(state_folder(), fingerprint) if d["tokens"]["decode"] == num_decoded), None
        )
    )


def test_status_shows_a_running_engine_and_its_model_without_one(invoke):
    code, out, _ = invoke("status", "--json")
    assert code == 0 and json.loads(out)["engines"] == []
    with (
        Engine.open(options=EngineOptions(context=256, expert_slots=40, speculate="off")) as engine,
        publisher(engine, state_folder()),
    ):
        list(engine.session().generate([1, 2, 3], SamplingParams(temperature=0), 8, ignore_eos=True))
        document = engine_document(engine.checkpoint.fingerprint, num_decoded=7)
        code, out, _ = invoke("status")
    assert document["tokens"] == {"prefill": 3, "decode": 7}
    assert document["read_bytes"] > 0
    assert sum(tier["num_experts"] for tier in document["tiers"]) == 5 * 64
    assert sum(sum(tier["hits"].values()) for tier in document["tiers"]) == sum(
        counts["locked"] + counts["ram"] for counts in document["counters"]["phases"].values()
    )
    assert code == 0 and "engine       process" in out and "hit rate" in out


def test_watch_and_json_exclude_each_other(invoke):
    code, _, err = invoke("status", "--watch", "--json")
    assert code == 2 and "not both" in err


def test_replay_prints_a_table_and_the_distance_to_the_optimum(invoke):
    trace = TRACES / "chats.answers.trace"
    code, out, _ = invoke("replay", trace, "--expert-slots", 80, "--heat-from", TRACES / "plays.text.trace")
    assert code == 0
    lines = out.splitlines()
    assert [line[22:35].strip() for line in lines[1:]] == ["glm-gpu", "LRU", "LFU", "static heat", "optimum"]
    assert lines[-1].endswith("0.0 pt")


def test_replay_prints_one_document(invoke):
    trace = TRACES / "plays.text.trace"
    code, out, _ = invoke("replay", trace, "--ram", "4MiB", "--json")
    found = json.loads(out)
    assert code == 0 and [row["policy"] for row in found] == ["glm-gpu", "LRU", "LFU", "optimum"]
    assert {row["capacity_bytes"] for row in found} == {4 << 20}
    assert len({json.dumps(row["uses"]) for row in found}) == 1


def test_replay_takes_kept_heat_of_the_same_model_only(invoke):
    trace = TRACES / "plays.text.trace"
    header = read_trace(trace).header
    kept = HeatFile(state_folder(), header.fingerprint)
    kept.save(learned([read_trace(trace)]))
    code, out, _ = invoke("replay", trace, "--ram", "4MiB", "--heat", kept.path)
    assert code == 0 and "static heat" in out
    other = HeatFile(state_folder(), "beef")
    other.save(learned([read_trace(trace)]))
    code, _, err = invoke("replay", trace, "--ram", "4MiB", "--heat", other.path)
    assert code == 2 and "no heat of model" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["absent.trace"], "cannot be read"),
        ([TRACES / "README.md"], "no trace"),
        ([TRACES / "plays.text.trace", "--ram", "4MiB", "--expert-slots", "5"], "not both"),
        ([TRACES / "plays.text.trace", "--ram", "1KiB"], "does not hold a single expert"),
    ],
)
def test_replay_refuses_what_it_cannot_do_in_one_line(invoke, args, message):
    code, out, err = invoke("replay", *args)
    assert code == 2 and not out
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "status", "replay"])
def test_help_ends_with_an_example(invoke, command):
    code, out, _ = invoke(command, "--help")
    assert code == 0
    assert out.strip().splitlines()[-1].strip().startswith(f"Example: glm-gpu {command}")


def test_no_home_means_no_state(monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert sys.platform == "win32" or state_folder() is None
