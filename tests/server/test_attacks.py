"""A server under attack: connections that dawdle, headers and bodies that lie, and what nobody must be told."""

import ast
import contextlib
import gzip
import inspect
import json
import socket
import time

import httpx
import pytest
from peak_memory import peak_bytes
from server_fixtures import serve
from waiting import LONG_S

from glm_gpu.json_file import json_memory_bytes
from glm_gpu.server import guard
from glm_gpu.server.connections import Connection

KEY = "a key of some length"
BODY = {"model": "demo", "prompt": "a secret", "max_tokens": 2}
HEADERS = {"Authorization": f"Bearer {KEY}"}
HOSTS = frozenset({"127.0.0.1", "localhost"})


class HurriedConnection(Connection):
    headers_timeout_s = 1.0


@pytest.fixture(scope="module")
def attacked(demo_context):
    with serve(demo_context, api_key=KEY, allowed_hosts=HOSTS, body_timeout_s=LONG_S, max_body_bytes=4 << 20) as served:
        yield served
        assert served.idle()


@pytest.fixture(scope="module")
def hurried(demo_context):
    """A server that waits no longer than a second for headers and bodies, and long for further requests."""
    options = {"body_timeout_s": 1.0, "protocol": HurriedConnection, "idle_s": 60}
    with serve(demo_context, api_key=KEY, allowed_hosts=HOSTS, **options) as served:
        yield served
        assert served.idle()


@pytest.fixture
def connect():
    """connect(server, bytes) -> a socket to it on which these were sent, as far as the server takes them."""
    opened = []

    def call(served, data):
        host, port = served.url.removeprefix("http://").split(":")
        opened.append(socket.create_connection((host, int(port)), timeout=LONG_S))
        with contextlib.suppress(ConnectionError):  # refused before all was sent
            opened[-1].sendall(data)
        return opened[-1]

    yield call
    for connection in opened:
        connection.close()


def received(connection):
    """Everything until the server closes; empty where it resets."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def request(*lines, body=b""):
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def is_alive(served):
    """Whether the next request is answered; it is sent in one piece, which no time limit can fall into."""
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps(BODY).encode()
    lines = [
        "Host: 127.0.0.1", f"Authorization: Bearer {KEY}", "Connection: close", "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]  # fmt: skip
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(request(*lines, body=body))
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return True


@pytest.mark.parametrize("beginning", [b"", b"POST /v1", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b"])
def test_connections_that_dawdle_over_their_headers_are_closed(hurried, connect, beginning):
    connections = [connect(hurried, beginning) for _ in range(40)]
    assert is_alive(hurried)
    for connection in connections:
        assert received(connection) == b""  # ends: the server closed it
    assert is_alive(hurried)


def test_dripping_headers_does_not_keep_a_connection(hurried, connect):
    connection = connect(hurried, b"POST /v1/completions HTTP/1.1\r\n")
    with pytest.raises(OSError):
        for number in range(200):
            connection.sendall(f"X-{number}: a\r\n".encode())
            time.sleep(0.05)


def test_dripping_a_body_does_not_keep_a_connection(hurried, connect):
    connection = connect(hurried, request("Host: 127.0.0.1", f"Authorization: Bearer {KEY}", "Content-Length: 1000"))
    connection.settimeout(0.05)
    answer = b""
    for _ in range(200):
        with contextlib.suppress(ConnectionError):  # the server has closed it, and what it said is still to be read
            connection.sendall(b" ")
        with contextlib.suppress(TimeoutError):
            answer = connection.recv(65536)
            break
    assert b" 408 " in answer


def test_a_second_request_on_a_kept_connection_is_watched_too(hurried, connect):
    connection = connect(hurried, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert b" 200 " in connection.recv(65536)
    time.sleep(1.4)  # longer than headers may take: between requests nothing is awaited
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea")
    assert received(connection).count(b" 200 ") == 1


@pytest.mark.parametrize("lines", [
    ["Host: 127.0.0.1", "X-Long: " + "a" * 200_000],
    ["Host: 127.0.0.1", *(f"X-{number}: a" for number in range(20_000))],
    ["Host: 127.0.0.1", "Content-Length: 5", "Content-Length: 6"],
    ["Host: 127.0.0.1", "Content-Length: -1"],
    ["Host: 127.0.0.1", "Content-Length: 99999999999999999999999"],
    ["Host: 127.0.0.1", "Content-Length: ٣"],
    ["Host: 127.0.0.1", "Transfer-Encoding: gzip, chunked"],
    ["Host: 127.0.0.1", "Transfer-Encoding: chunked, chunked"],
    ["Host: 127.0.0.1", "Host: evil.example"],
    ["Host: evil.example"],
    ["Host: 127.0.0.1@evil.example"],
    ["Host: 127.0.0.1.evil.example"],
    ["X-No-Host: 1"],
    ["Host: 127.0.0.1", "Bad Header: x"],
    ["Host: 127.0.0.1", "X: a\x00b"],
], ids=lambda lines: " ".join(lines)[:40])  # fmt: skip
def test_headers_that_lie_or_never_end_are_refused(attacked, connect, lines):
    data = request(*(line.encode().decode("latin-1") for line in lines))
    status = received(connect(attacked, data)).partition(b"\r\n")[0]
    # h11 refuses the malformed, the guard the rest: no key was given either
    assert status.split(b" ")[1:2] and status.split(b" ")[1] in (b"400", b"401", b"403", b"413", b"431", b"501"), status
    assert is_alive(attacked)


@pytest.mark.parametrize("chunk", [b"ffffffffffffffff\r\n", b"-5\r\n", b"zz\r\n", b"5;" + b"a" * 99_999, b"0\r\nX: y"])
def test_chunks_that_lie_end_the_connection_alone(hurried, connect, chunk):
    data = request("Host: 127.0.0.1", f"Authorization: Bearer {KEY}", "Transfer-Encoding: chunked", body=chunk)
    answer = received(connect(hurried, data))
    assert not answer or answer.split(b" ")[1] in (b"400", b"408", b"413"), answer[:200]
    assert is_alive(hurried)


def test_compressed_bodies_are_not_unpacked(attacked):
    bomb = gzip.compress(b"[" + b"[]," * 5_000_000 + b"0]")
    answer = httpx.post(
        f"{attacked.url}/v1/completions", content=bomb,
        headers={**HEADERS, "Content-Encoding": "gzip", "Content-Type": "application/json"}, timeout=LONG_S,
    )  # fmt: skip
    assert answer.status_code == 400 and "Traceback" not in answer.text


def test_a_body_of_many_small_values_is_refused_before_it_is_parsed(attacked):
    content = b'{"prompt": [' + b"[]," * 1_000_000 + b"0]}"
    assert json_memory_bytes(content) > 17 * (4 << 20)

    def refuse():
        answer = httpx.post(f"{attacked.url}/v1/completions", content=content, headers=HEADERS, timeout=LONG_S)
        assert answer.status_code == 413 and "so many values" in answer.text

    bound = 8 * len(content)  # the client's copies counted
    assert peak_bytes(refuse, bound) < bound


PATHS = [
    "/static/../guard.py", "/static/%2e%2e/guard.py", "/static/..%2fguard.py", "//etc/passwd", "/static//etc/passwd",
    "/static/%00", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/static/app.js%00.css",
    "/%c0%ae%c0%ae/", "/" + "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:40])
def test_no_path_leads_to_a_file(attacked, connect, path):
    data = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    answer = received(connect(attacked, data.encode()))
    assert answer.split(b" ")[1] in (b"400", b"404"), answer[:200]
    assert b"root:" not in answer and b"import" not in answer


def test_upgrades_and_odd_methods_lead_nowhere(attacked, connect):
    upgrade = "Host: 127.0.0.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    for line in ("GET /", "CONNECT 127.0.0.1:22", "TRACE /", "OPTIONS *", "PRI *"):
        answer = received(connect(attacked, f"{line} HTTP/1.1\r\n{upgrade}".encode()))
        assert b" 101 " not in answer and b"Sec-WebSocket" not in answer


def test_no_other_site_is_let_in(attacked):
    """No answer allows another origin to read it."""
    for method in ("GET", "OPTIONS", "POST"):
        answer = httpx.request(
            method, f"{attacked.url}/v1/models", headers={**HEADERS, "Origin": "https://evil.example"}, timeout=LONG_S
        )
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Whatever is given, the comparison is `hmac.compare_digest`, and there is no other."""
    seen = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or a == b)
    for given in ("", KEY[:-1], KEY, "x" * 5000):
        assert guard._has_key({"authorization": f"Bearer {given}"}, KEY) == (given == KEY)
    assert [a for a, _ in seen] == [b"", KEY[:-1].encode(), KEY.encode(), b"x" * 5000]
    tree = ast.parse(inspect.getsource(guard._has_key))
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    names = {name.id for node in compared for name in ast.walk(node) if isinstance(name, ast.Name)}
    assert not names & {"key", "given"}


def test_an_internal_error_tells_nothing_of_the_inside(attacked, caplog):
    def fail(batch):
        raise KeyError("a secret of the inside")

    attacked.model.before_pass = fail
    try:
        answer = httpx.post(f"{attacked.url}/v1/completions", json=BODY, headers=HEADERS, timeout=LONG_S)
    finally:
        attacked.model.before_pass = lambda batch: None
    assert answer.status_code == 500 and "secret" not in answer.text and "Traceback" not in answer.text
    assert json.loads(answer.text)["error"]["type"] == "server_error"
    assert attacked.idle() and is_alive(attacked)
