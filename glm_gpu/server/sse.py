"""Server-sent events: data as it comes, and a comment whenever nothing has come for a while."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from glm_gpu.server.generation import Event, Generation, Progress
from glm_gpu.server.problems import ApiError, problem_body, problem_of

T = TypeVar("T")
_HEADERS = {"X-Accel-Buffering": "no"}  # nginx would otherwise hold a stream back


def data(value: Any, event: str | None = None) -> str:
    """One event, its JSON on one line."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


class Answer(Protocol):
    """A generation in the shapes of one interface."""

    def opening(self) -> list[str]:
        """What a stream sends before the first token."""

    def encode(self, index: int, event: Event) -> list[str]:
        """What a stream sends for an event of a choice."""

    def closing(self) -> list[str]:
        """What a stream sends at its end."""

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""


class Stream(StreamingResponse):
    """A response whose head and opening go out at once. However it ends, its generation ends with it.

    A failure after that is an event with the error as its data, and nothing follows it.

    Args:
        error_event: the name of such events; None for plain data.
    """

    def __init__(
        self, request: Request, generation: Generation, answer: Answer, keep_alive_s: float, error_event: str | None
    ) -> None:
        self._request, self._generation = request, generation
        body = self._body(answer, keep_alive_s, error_event)
        super().__init__(body, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # here and not in the body, which never begins when the client is gone already
            self._generation.cancel()
            self._request.state.log |= self._generation.log_entry()

    async def _body(self, answer: Answer, keep_alive_s: float, error_event: str | None) -> AsyncIterator[str]:
        try:
            for part in answer.opening():
                yield part
            async for part in _parts(self._generation, keep_alive_s, answer.encode):
                yield part
            for part in answer.closing():
                yield part
        except Exception as error:
            yield data(problem_body(self._request.url.path, problem_of(error)), error_event)


async def _parts(
    generation: Generation, keep_alive_s: float, encode: Callable[[int, Event], list[str]]
) -> AsyncIterator[str]:
    """Encoded events, with comments by the clock: a chunk of prefill that takes minutes must not look like death."""
    progress = ""
    loop = asyncio.get_running_loop()
    last_sent = loop.time()
    while not generation.is_done:
        found = await generation.next(last_sent + keep_alive_s - loop.time())
        parts = []
        if found is not None and isinstance(found[1], Progress):
            progress = f" prefill {found[1].num_done}/{found[1].num_prompt}"
        elif found is not None:
            parts = encode(*found)
        if not parts and loop.time() - last_sent >= keep_alive_s:
            parts = [f": keep-alive{progress}\n\n"]
        for part in parts:
            last_sent = loop.time()
            yield part


async def unless_disconnected(request: Request, generation: Generation, answer: Awaitable[T]) -> T:
    """An answer that is sent whole, or the end of its generation as soon as the client is gone."""
    task, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        generation.cancel()
        request.state.log |= generation.log_entry()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
