"""Time: heads at once, comments by the clock, clients that leave, queues that are full, failures half-way."""

import json
import socket
import threading

import httpx
import openai as sdk
import pytest
from server_fixtures import serve
from waiting import LONG_S, wait_until

from glm_gpu.errors import CheckpointError

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def test_the_head_comes_at_once_and_comments_by_the_clock(served, http):
    """C41. One pass that stands still until four comments have come: nothing but the clock can cause a byte."""
    may_go_on, lines = threading.Event(), []
    served.says = "at last"
    served.model.before_pass = lambda batch: may_go_on.wait(LONG_S)
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 1}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        for line in filter(None, answer.iter_lines()):
            assert may_go_on.is_set() or line.startswith(": keep-alive")
            lines.append(line)
            if len(lines) == 4:
                may_go_on.set()
    assert lines[-1] == "data: [DONE]"


def test_comments_tell_how_far_a_prompt_is(served, http):
    is_told = threading.Event()
    served.model.before_pass = lambda batch: batch.positions.max() < 512 or is_told.wait(LONG_S)
    body = {"prompt": [7] * 1200, "stream": True, "max_tokens": 1}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if "prefill 512/1200" in line:
                is_told.set()
    assert is_told.is_set()


def test_openai_s_client_reads_past_comments(served, ask):
    """C41."""
    served.says = "slow but sure"
    served.model.pass_s = 0.2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True)) == "slow but sure"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill", "queued"])
def test_a_client_that_leaves_is_forgotten_in_every_phase(demo_context, stream, phase):
    """C39. The model stands still in the phase until the client has left, and then has work for seconds."""
    is_there, has_left = threading.Event(), threading.Event()
    with serve(demo_context, options={"max_running": 1, "max_rows": 16}) as served:

        def stand_still(batch):
            if batch.positions.max() > 20:  # of the prompt of 1500 in the phase that prefills
                is_there.set()
                assert has_left.wait(LONG_S)
                served.model.pass_s = 0.01

        served.model.before_pass = stand_still
        long = {"prompt": [9] * (1500 if phase == "prefill" else 3), "max_tokens": 500, "ignore_eos": True}
        if phase == "queued":
            options = {"json": {"prompt": [3], "max_tokens": 60, "ignore_eos": True}, "timeout": LONG_S}
            first = threading.Thread(target=httpx.post, args=(f"{served.url}/v1/completions",), kwargs=options)
            first.start()
            assert is_there.wait(LONG_S)
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            content = json.dumps({**long, "stream": stream}).encode()
            head = f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(content)}", "", ""
            connection.sendall("\r\n".join(["POST /v1/completions HTTP/1.1", *head]).encode() + content)
            if stream:
                assert b" 200 " in connection.recv(4096)
            if phase == "queued":
                wait_until(lambda: served.scheduler.num_queued)
            assert is_there.wait(LONG_S)
        has_left.set()
        assert served.idle()
        if phase == "queued":
            first.join()
        assert served.scheduler.counts.ended["cancelled"] == 1
        served.model.pass_s, served.model.before_pass = 0.0, lambda batch: None
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "next", "max_tokens": 1}, timeout=LONG_S)
        assert answer.status_code == 200


def test_a_full_queue_answers_429_and_when_to_come_back(demo_context):
    with serve(demo_context, options={"max_running": 1, "max_queued": 1}) as served:
        is_refused = threading.Event()
        served.model.before_pass = lambda batch: is_refused.wait(LONG_S)
        body = {"prompt": [3], "max_tokens": 50, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=served.url, timeout=LONG_S) as client:
            streams = []
            for n in range(2):
                streams.append(client.stream("POST", "/v1/completions", json=body))
                assert streams[-1].__enter__().status_code == 200
                # the first runs before the second comes, which else would be one too many in the queue
                wait_until(lambda n=n: (served.scheduler.num_running, served.scheduler.num_queued) == (1, n))
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "2"
            assert refused.json()["error"]["code"] == "queue_full"
            with sdk.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as openai, \
                    pytest.raises(sdk.RateLimitError):  # fmt: skip
                openai.completions.create(model="demo", prompt="x", n=2)
            is_refused.set()
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
