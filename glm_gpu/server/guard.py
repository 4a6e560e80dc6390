"""What every request passes first: host, key, size, and how many there are; and at the end a line of log."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_gpu.json_file import json_memory_bytes
from glm_gpu.server.problems import Problem, problem_body
from glm_gpu.server.settings import ServerSettings

access_log = logging.getLogger("glm_gpu.access")

# What a browser must get before it can ask for a key; none of it tells of the model or of anyone's requests.
_STATIC = ("app.js", "docs.js", "markdown.js", "style.css")
_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/favicon.ico", *(f"/static/{name}" for name in _STATIC)})
# As for files, see `json_file`; a million token ids come to 120 MiB by `json_memory_bytes`.
_MEMORY_RATIO, _MIN_MEMORY_BYTES = 17, 16 << 20
_MIN_BODY_BYTES_S = 20_000
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


class ActiveRequests:
    """How many HTTP requests are being answered."""

    count = 0


class Guard:
    """ASGI middleware; what it refuses never reaches the application.

    The Host check keeps pages of other sites, whose names an attacker points at this machine, from reading answers.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, active: ActiveRequests) -> None:
        self._app, self._settings, self._active = app, settings, active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, seen = time.monotonic(), {"status": 499}

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), *_SECURITY_HEADERS]
            await send(message)

        scope["state"] = {**scope.get("state", {}), "log": {}}
        self._active.count += 1
        try:
            problem = self._refusal(scope)
            if problem is not None:
                await self._refuse(scope, receive, send_on, problem)
            else:
                await self._pass_on(scope, receive, send_on)
        finally:
            self._active.count -= 1
            self._log(scope, seen["status"], time.monotonic() - began)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers, settings = Headers(scope=scope), self._settings
        if settings.allowed_hosts and _host_name(headers.get("host", "")) not in settings.allowed_hosts:
            return Problem(403, "this Host is not served here; start the server with --allow-host to add it")
        if self._active.count > settings.max_connections:
            return Problem(503, f"{settings.max_connections} requests are being answered, the most there may be")
        if (
            settings.api_key is not None
            and scope["path"] not in _OPEN_PATHS
            and not _has_key(headers, settings.api_key)
        ):
            message = "no valid API key was given; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            return Problem(401, message, code="invalid_api_key")
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > settings.max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than {self._settings.max_body_bytes} bytes, the most that is read")

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on with its whole body read, so that no handler waits for a client that dawdles."""
        body, size, has_more = [], 0, True
        deadline = time.monotonic() + self._settings.body_timeout_s
        while has_more:
            try:
                # a byte now and then is no progress
                left_s = deadline + size / _MIN_BODY_BYTES_S - time.monotonic()
                message = await asyncio.wait_for(receive(), max(0.0, left_s))
            except TimeoutError:
                await self._refuse(scope, receive, send, Problem(408, "the body did not arrive in time"))
                return
            if message["type"] == "http.disconnect":
                return
            body.append(message.get("body", b""))
            size += len(body[-1])
            has_more = message.get("more_body", False)
            if size > self._settings.max_body_bytes:
                await self._refuse(scope, receive, send, self._too_large())
                return
        text = b"".join(body)
        if json_memory_bytes(text) > max(_MIN_MEMORY_BYTES, _MEMORY_RATIO * self._settings.max_body_bytes):
            problem = Problem(413, "the body holds so many values that reading it would take too much memory")
            await self._refuse(scope, receive, send, problem)
            return
        whole: Message | None = {"type": "http.request", "body": text, "more_body": False}

        async def receive_whole() -> Message:
            nonlocal whole
            if whole is not None:
                message, whole = whole, None
                return message
            return await receive()

        await self._app(scope, receive_whole, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, problem: Problem) -> None:
        # The rest of the request is not read: so the connection cannot be used again.
        headers = {**problem.headers(), "Connection": "close"}
        await JSONResponse(problem_body(scope["path"], problem), problem.status, headers)(scope, receive, send)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """One JSON object a request: sizes and times, never what anyone wrote."""
        if not access_log.isEnabledFor(logging.INFO):
            return
        route = scope.get("route")
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "client": (scope.get("client") or ("-",))[0],
            "method": scope["method"],
            "path": getattr(route, "path", None) or "(none)",
            "status": status,
            "seconds": round(seconds, 4),
        }
        access_log.info(json.dumps(entry | scope["state"]["log"]))


def _has_key(headers: Mapping[str, str], key: str) -> bool:
    bearer = headers.get("authorization", "")
    given = bearer[7:].strip() if bearer[:7].lower() == "bearer " else headers.get("x-api-key", "")
    # Bytes, for compare_digest refuses text outside ASCII; its time does not tell how much of a key was right.
    # Starlette reads headers as Latin-1, so this gives back what was sent.
    return hmac.compare_digest(given.encode("latin-1"), key.encode())


def _host_name(host: str) -> str:
    """The Host header without its port: `[::1]:8000` is `[::1]`."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
