"""Keys, hosts, sizes, connections, malformed requests, and what is logged."""

import json
import logging
import socket

import httpx
import pytest
from server_fixtures import serve
from waiting import LONG_S, wait_until

HOSTS = frozenset({"127.0.0.1", "localhost"})
KEY_HEADERS = {"x-api-key": "schlüssel".encode()}
BODY = {"model": "demo", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2}


def serve_locked(demo_context, **settings):
    return serve(demo_context, api_key="schlüssel", allowed_hosts=HOSTS, max_body_bytes=20_000, **settings)


@pytest.fixture(scope="module")
def locked(demo_context):
    with serve_locked(demo_context, body_timeout_s=LONG_S) as served:
        yield served


@pytest.fixture
def post(locked):
    """post(headers, path) -> the status of a small request."""

    def call(headers, path="/v1/chat/completions"):
        with httpx.Client(base_url=locked.url, timeout=LONG_S) as client:
            return client.post(path, json=BODY, headers=headers).status_code

    return call


def test_a_key_is_asked_for_and_both_ways_of_giving_it_work(locked, post):
    assert post({}) == 401
    for wrong in ("Bearer", "Bearer x", "Bearer schl", "Basic schlüssel", "Bearer schlüssel2"):
        assert post({"Authorization": wrong.encode()}) == 401
    assert post({"Authorization": "Bearer schlüssel".encode()}) == 200
    assert post(KEY_HEADERS) == 200
    with httpx.Client(base_url=locked.url, timeout=LONG_S) as client:
        assert client.get("/health").status_code == 200 and client.get("/").status_code == 200
        for path in ("/status", "/metrics", "/experts", "/v1/models", "/openapi.json"):
            assert client.get(path).status_code == 401
        refused = client.post("/v1/messages", json=BODY)
        assert refused.json()["error"]["type"] == "authentication_error" and "WWW-Authenticate" in refused.headers


def test_another_host_is_refused(post):
    assert post({**KEY_HEADERS, "Host": "evil.example"}) == 403
    assert post({**KEY_HEADERS, "Host": "127.0.0.1.evil.example:80"}) == 403
    assert post({**KEY_HEADERS, "Host": "LOCALHOST:1234"}) == 200


def test_large_bodies_are_refused(locked):
    with httpx.Client(base_url=locked.url, headers=KEY_HEADERS, timeout=LONG_S) as client:
        whole = client.post("/v1/completions", content=b"x" * 20_001)
        parts = client.post("/v1/completions", content=(b"x" * 999 for _ in range(50)))
    assert whole.status_code == parts.status_code == 413
    assert whole.json()["error"]["type"] == "request_too_large"


def test_a_body_that_does_not_come_is_refused(demo_context):
    with serve_locked(demo_context, body_timeout_s=0.3) as locked:
        host, port = locked.url.removeprefix("http://").split(":")
        lines = "POST /v1/completions HTTP/1.1", f"Host: {host}", "x-api-key: schlüssel", "Content-Length: 100", "", "{"
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            connection.sendall("\r\n".join(lines).encode())
            assert b" 408 " in connection.recv(4096)


def test_more_connections_than_allowed_are_told_to_come_back(demo_context):
    body = {**BODY, "stream": True, "max_tokens": 1000, "ignore_eos": True}
    with (
        serve_locked(demo_context, body_timeout_s=LONG_S, max_connections=3) as locked,
        httpx.Client(base_url=locked.url, headers=KEY_HEADERS, timeout=LONG_S) as client,
    ):
        locked.model.pass_s = 0.01
        streams = [client.stream("POST", "/v1/chat/completions", json=body) for _ in range(3)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        refused = client.get("/status")
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "2"
        for stream in streams:
            stream.__exit__(None, None, None)
        assert locked.idle()


def test_the_log_has_sizes_and_times_and_nothing_that_anyone_wrote(locked, post, caplog):
    with caplog.at_level(logging.INFO, logger="glm_gpu.access"):
        post(KEY_HEADERS)
        wait_until(lambda: caplog.records)  # an entry is written just after the answer has gone
        post({}, "/nowhere/with/a/secret")
        wait_until(lambda: len(caplog.records) >= 2)
    entries = [json.loads(record.getMessage()) for record in caplog.records]
    assert entries[0]["path"] == "/v1/chat/completions" and entries[0]["status"] == 200
    assert entries[0]["completion_tokens"] <= 2 and entries[0]["prompt_tokens"] > 5 and entries[0]["finish"]
    assert entries[1]["status"] == 401 and "secret" not in caplog.text and "schl" not in caplog.text


MALFORMED = [
    b"", b"{", b"null", b"[]", b'"text"', b"1", b"\xff\xfe", b"{'a': 1}", b'{"messages": }', b"[" * 5000,
    b'{"messages": null}', b'{"messages": "hi"}', b'{"messages": [1]}', b'{"messages": [null]}', b'{"messages": [[]]}',
    b'{"messages": [{}]}', b'{"messages": [{"role": 5}]}', b'{"messages": [{"role": "user", "content": {}}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1.5}',
    b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": [1]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": true}',
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_bodies_get_400_as_json_and_no_trace(http, body):
    """C46."""
    answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"] and "Traceback" not in answer.text


def test_another_charset_or_type_is_no_json(http):
    body = json.dumps({**BODY, "user": "é"}, ensure_ascii=False)
    for encoded, kind in ((body.encode("latin-1"), "application/json"), (body.encode(), "text/plain")):
        answer = http.post("/v1/chat/completions", content=encoded, headers={"Content-Type": kind})
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"}],
        [{"role": "user", "content": "x"},
         {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
          "tool_calls": [{"id": "", "type": "function", "function": {"name": "f", "arguments": ""}}]},
         {"role": "tool", "tool_call_id": "", "content": [{"type": "text", "text": "done"}]}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
         {"role": "tool", "tool_call_id": "c1", "content": "done", "toolName": "f"}],
    ],
)  # fmt: skip
def test_messages_as_sdks_send_them_are_accepted(http, messages):
    """C46."""
    answer = http.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 2, "user": "u", "store": False}
    )
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_unknown_paths_and_methods_have_the_same_shape(http):
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/chat/completions").status_code == 405
    assert http.get("/static/../app.py").status_code == 404
    assert http.get("/static/%2e%2e/settings.py").status_code == 404
