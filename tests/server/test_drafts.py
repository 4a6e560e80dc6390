"""Drafts in a live server over the demo's own model: every answer is the one that a server without drafts gives."""

import concurrent.futures

import httpx
import pytest
from server_fixtures import CONTEXT, serve
from waiting import LONG_S

from glm_gpu.engine import Engine
from glm_gpu.grammar import Grammar
from glm_gpu.kernels import cpu
from glm_gpu.model.transformer import cache_layout
from glm_gpu.opening import EngineOptions
from glm_gpu.server.constraints import AfterReasoning
from glm_gpu.speculative import WidthPolicy

parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra 'test'")

SCHEMA = {
    "type": "object",
    "properties": {"speaker": {"enum": ["Moses", "Hamlet"]}, "is_king": {"type": "boolean"}},
    "required": ["speaker", "is_king"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "line", "schema": SCHEMA}}
TEXT = "And it came to pass in those days, and it came to pass in those nights, that"
REQUESTS = [
    ("completions", {"prompt": TEXT, "max_tokens": 70}),
    ("completions", {"prompt": TEXT, "max_tokens": 40, "stop": [" the"]}),
    ("completions", {"prompt": TEXT + " there was", "max_tokens": 33, "logprobs": 2, "echo": True}),
    ("completions", {"prompt": "KING: ", "max_tokens": 50, "temperature": 0.8, "top_p": 0.9, "seed": 5}),
    ("completions", {"prompt": "KING: ", "max_tokens": 1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Who art thou?"}], "max_tokens": 60}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Who?"}], "response_format": FORMAT,
                          "chat_template_kwargs": {"enable_thinking": False}, "logprobs": True, "top_logprobs": 1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Say it again"}], "max_tokens": 45, "n": 2,
                          "temperature": 1.0, "seed": 3}),
]  # fmt: skip

# On NumPy a case takes most of a minute, and what differs between them does not depend on the kernels.
CASES = [(mode, width) for mode in ("auto", "ngram", "grammar") for width in (None, 1, 4, 8)]
CASES = CASES if cpu.active else [("auto", None)]


@pytest.fixture(scope="module")
def engine():
    with Engine.open(None, EngineOptions(context=CONTEXT)) as engine:
        yield engine


def live(engine, **options):
    return serve(engine, engine.model, layout=cache_layout(engine.config, is_bf16=True), num_pages=64, options=options)


def ask_all(served, requests, num_together):
    """The choices of every answer, `num_together` requests at a time."""

    def choices(request):
        path, body = request
        answer = httpx.post(f"{served.url}/v1/{path}", json={"model": "demo", "temperature": 0, **body}, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with concurrent.futures.ThreadPoolExecutor(num_together) as pool:
        return list(pool.map(choices, requests))


@pytest.fixture(scope="module")
def alone(engine):
    """What each request gets alone and without drafts."""
    with live(engine) as served:
        return ask_all(served, REQUESTS, 1)


@pytest.mark.parametrize(("mode", "width"), CASES)
def test_answers_with_drafts_among_others_are_those_alone_without(engine, alone, monkeypatch, mode, width):
    monkeypatch.setattr(engine, "speculate", mode)
    monkeypatch.setattr(engine, "speculation", WidthPolicy(fixed_width=width))
    with live(engine, make_speculator=engine.speculator) as served:
        assert ask_all(served, REQUESTS * 2, 6) == alone * 2
        counts = served.scheduler.counts
        assert counts.accepted_tokens > 0 or width is None  # whether drafts pay is a matter of time
        assert mode != "grammar" or counts.accepted_tokens == counts.drafted_tokens


def test_a_schema_s_forced_tokens_are_drafts_that_come_true(engine, monkeypatch):
    monkeypatch.setattr(engine, "speculate", "grammar")
    with live(engine, make_speculator=engine.speculator) as served:
        ask_all(served, [REQUESTS[6]] * 4, 2)
        status = httpx.get(f"{served.url}/status", timeout=LONG_S).json()["speculation"]
        assert status["mode"] == "grammar" and status["accepted_tokens"] == status["drafted_tokens"] > 20
        assert status["tokens_per_pass"] > 1.2


def test_decision_and_acceptance_are_shown(engine, monkeypatch):
    monkeypatch.setattr(engine, "speculation", WidthPolicy(fixed_width=2))
    with live(engine, make_speculator=engine.speculator) as served:
        ask_all(served, REQUESTS[:2], 2)
        status = httpx.get(f"{served.url}/status", timeout=LONG_S).json()["speculation"]
        families = parser.text_string_to_metric_families(httpx.get(f"{served.url}/metrics", timeout=LONG_S).text)
        metrics = {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}
    assert status["mode"] == "auto" and 0 < status["accepted_tokens"] < status["drafted_tokens"]
    assert metrics[("glm_gpu_drafted_tokens_total", ("accepted", "yes"))] == status["accepted_tokens"]
    tried, right = status["drafts"]["mtp"]["tried"][0], status["drafts"]["mtp"]["right"][0]
    assert metrics[("glm_gpu_guesses_total", ("came", "true"), ("depth", "1"), ("source", "mtp"))] == right
    assert metrics[("glm_gpu_guesses_total", ("came", "false"), ("depth", "1"), ("source", "mtp"))] == tried - right
    assert metrics[("glm_gpu_draft_width",)] == status["width"] and ("glm_gpu_draft_gain",) in metrics


def test_guesses_are_checked_by_a_schema_only_behind_the_reasoning(engine):
    tokenizer = engine.tokenizer
    end_think, end = tokenizer.token_id("</think>"), min(engine.turn_ids)
    right, wrong = tokenizer.encode('{"speaker": "Moses"'), tokenizer.encode("[1")
    thoughts = tokenizer.encode("let me see")
    constraint = AfterReasoning(engine.constraint(Grammar.from_json_schema(SCHEMA)), end_think)
    assert constraint.forced(8) == []
    assert constraint.num_valid([*thoughts, *wrong]) == len(thoughts) + len(wrong)
    assert constraint.num_valid([*thoughts, end, *thoughts]) == len(thoughts)
    assert constraint.num_valid([*thoughts, end_think, *right]) == len(thoughts) + 1 + len(right)
    assert constraint.num_valid([*thoughts, end_think, *wrong]) == len(thoughts) + 1
    for token_id in (*thoughts, end_think):
        constraint.push(token_id)
    assert constraint.num_valid(right) == len(right) and constraint.num_valid(wrong) == 0
    assert tokenizer.decode(constraint.forced(8)).startswith('{"speaker": "')
