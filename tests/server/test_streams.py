"""Time: heads at once, comments by the clock, clients that leave, queues that are full, failures half-way."""

import itertools
import threading
import time

import httpx
import openai as sdk
import pytest
from server_fixtures import serve

from glm_gpu.errors import CheckpointError

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def test_the_head_comes_at_once_and_comments_by_the_clock(served, http):
    """C41. One pass that stalls for a second: nothing but the clock can cause a byte."""
    served.says = "at last"
    served.model.pass_s = 1.0
    began = time.monotonic()
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 1}) as answer:
        assert answer.status_code == 200 and time.monotonic() - began < 0.5
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [(time.monotonic() - began, line) for line in answer.iter_lines() if line]
    comments = [at for at, line in lines if line.startswith(": keep-alive")]
    assert len(comments) >= 4 and comments[0] < 0.5
    assert max(b - a for a, b in itertools.pairwise(comments)) < 0.5
    assert lines[-1][1] == "data: [DONE]"


def test_comments_tell_how_far_a_prompt_is(served, http):
    served.model.row_s = 0.002
    body = {"prompt": [7] * 1200, "stream": True, "max_tokens": 1}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith(":")]
    assert any("prefill 512/1200" in line or "prefill 1024/1200" in line for line in lines)


def test_openai_s_client_reads_past_comments(served, ask):
    """C41."""
    served.says = "slow but sure"
    served.model.pass_s = 0.2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True)) == "slow but sure"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill", "queued"])
def test_a_client_that_leaves_is_forgotten_in_every_phase(demo_context, stream, phase):
    """C39."""
    with serve(demo_context, options={"max_running": 1, "max_rows": 16}) as served:
        served.model.pass_s = 0.01
        long = {"prompt": [9] * (1500 if phase == "prefill" else 3), "max_tokens": 400, "ignore_eos": True}
        if phase == "queued":
            first = threading.Thread(
                target=httpx.post,
                args=(f"{served.url}/v1/completions",),
                kwargs={"json": {"prompt": [3], "max_tokens": 60}},
            )
            first.start()
            while not served.scheduler.num_running:
                time.sleep(0.005)
        with httpx.Client(base_url=served.url) as client:
            if stream:
                with client.stream("POST", "/v1/completions", json={**long, "stream": True}):
                    time.sleep(0.15)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=long, timeout=0.15)
        began = time.monotonic()
        assert served.idle(1.5)
        if phase != "queued":
            assert time.monotonic() - began < 0.5
        else:
            first.join()
        assert served.scheduler.counts.ended["cancelled"] == 1
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "next", "max_tokens": 1})
        assert answer.status_code == 200 and answer.elapsed.total_seconds() < 1


def test_a_full_queue_answers_429_and_when_to_come_back(demo_context):
    with serve(demo_context, options={"max_running": 1, "max_queued": 1}) as served:
        served.model.pass_s = 0.02
        body = {"prompt": [3], "max_tokens": 50, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=served.url) as client:
            streams = []
            for n in range(2):
                streams.append(client.stream("POST", "/v1/completions", json=body))
                assert streams[-1].__enter__().status_code == 200
                while served.scheduler.num_running + served.scheduler.num_queued <= n:
                    time.sleep(0.002)
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "2"
            assert refused.json()["error"]["code"] == "queue_full"
            with sdk.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as openai, \
                    pytest.raises(sdk.RateLimitError):  # fmt: skip
                openai.completions.create(model="demo", prompt="x", n=2)
            for stream in streams:
                stream.__exit__(None, None, None)


def test_a_failure_behind_the_head_is_an_event_and_the_last_one(served, http, ask):
    """C41."""
    served.says = "as far as it goes"

    def fail_late(batch):
        if batch.positions.max() > 40:
            raise CheckpointError("shard 3: expert 5 of layer 7 cannot be read; check the disk")

    served.model.before_pass = fail_late
    body = {"prompt": [5] * 38, "max_tokens": 20, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert "expert 5 of layer 7" in lines[-1] and '"server_error"' in lines[-1] and len(lines) > 2
    with pytest.raises(sdk.APIError, match="expert 5 of layer 7"):
        list(ask(messages=[{"role": "user", "content": "x" * 200}], stream=True))
    whole = http.post("/v1/completions", json={**body, "stream": False})
    assert whole.status_code == 500 and "expert 5 of layer 7" in whole.json()["error"]["message"]
    served.model.before_pass = lambda batch: None
    assert http.post("/v1/completions", json={**body, "stream": False}).status_code == 200


def test_a_deadline_is_an_error_of_its_own(served, http):
    served.model.pass_s = 0.05
    body = {"prompt": [5], "max_tokens": 50, "ignore_eos": True, "deadline_s": 0.2}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
