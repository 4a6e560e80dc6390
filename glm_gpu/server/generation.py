"""Answers between the scheduler's thread and the server's loop: tokens to text on one side, events on the other."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from glm_gpu.chat import Delta, ReplyParser, StopMatcher
from glm_gpu.jobs import Job, Request, Result, Token
from glm_gpu.scheduler import Scheduler
from glm_gpu.tokenizer import TextStream


@dataclass(frozen=True)
class Progress:
    """So much of a prompt is computed."""

    num_done: int
    num_prompt: int


@dataclass(frozen=True)
class Piece:
    """What a token added: its text as far as it is certain, and the token."""

    deltas: list[Delta]
    token: Token


@dataclass(frozen=True)
class Ended:
    """The last of a choice: text that was held back, how it went, and the stop string that ended it."""

    deltas: list[Delta]
    result: Result
    finish_reason: str
    stop: str | None


Event = Progress | Piece | Ended


class Reader:
    """One answer's tokens to text: whole characters, nothing of a stop string, and the parts of a reply.

    Args:
        text: the tokenizer's stream.
        stops: stop strings, found in reasoning and tool calls too.
        parser: splits a chat's reply; None leaves all text as content.
        in_reasoning: whether the reply begins with reasoning.
        max_calls: end the answer behind so many tool calls.
    """

    def __init__(
        self,
        text: TextStream,
        stops: Sequence[str] = (),
        parser: ReplyParser | None = None,
        in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._text, self._stop, self._parser = text, StopMatcher(stops), parser
        self._max_calls = max_calls
        self.num_calls = 0
        self.num_reasoning = 0
        self._is_reasoning = in_reasoning

    def push(self, token_id: int) -> list[Delta]:
        """What a token adds."""
        deltas = self._read(self._stop.push(self._text.push(token_id)))
        if self._is_reasoning and all(delta.kind == "reasoning" for delta in deltas):
            self.num_reasoning += 1
        else:
            self._is_reasoning = False
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back."""
        deltas = self._read(self._stop.push(self._text.finish()) + self._stop.finish())
        if self._parser is not None:
            deltas += self._count(self._parser.finish())
        return deltas

    @property
    def is_satisfied(self) -> bool:
        """Whether nothing that may still come is wanted."""
        return self._stop.matched is not None or (self._max_calls is not None and self.num_calls >= self._max_calls)

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stop.matched

    def _read(self, text: str) -> list[Delta]:
        if self._parser is not None:
            return self._count(self._parser.push(text))
        return [Delta("content", text)] if text else []

    def _count(self, deltas: list[Delta]) -> list[Delta]:
        self.num_calls += sum(delta.kind == "tool_call" for delta in deltas)
        return deltas


class _Choice:
    """Listens to one request; everything here runs on the scheduler's thread."""

    def __init__(self, reader: Reader, post: Callable[[Event], None]) -> None:
        self._reader, self._post = reader, post

    def prefilled(self, num_done: int, num_prompt: int) -> None:
        self._post(Progress(num_done, num_prompt))

    def token(self, token: Token) -> bool:
        self._post(Piece(self._reader.push(token.id), token))
        return self._reader.is_satisfied

    def ended(self, result: Result) -> None:
        reader = self._reader
        deltas = reader.finish()
        reason = result.finish_reason or "stop"
        if reader.num_calls and reason == "stop":
            reason = "tool_calls"
        self._post(Ended(deltas, result, reason, reader.stop))


class Deliveries:
    """Carries events from the scheduler's thread to the server's loop, which is woken once for all of a pass.

    Woken at the first token, the loop would take the interpreter from the scheduler before the others are chosen.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[Callable[[int, Event], None], int, Event]] = deque()

    def post(self, arrive: Callable[[int, Event], None], index: int, event: Event) -> None:
        """Call `arrive` on the loop, after the next `send`."""
        self._waiting.append((arrive, index, event))

    def receive_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver on this loop from here on."""
        self._loop = loop

    def send(self) -> None:
        """Wake the loop for what was posted. It is closed only when the server ends, and then nobody waits."""
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._waiting:
            arrive, index, event = self._waiting.popleft()
            arrive(index, event)


@dataclass
class Generation:
    """One or more answers under way, as events on the server's loop. Make it on the loop, with `start`."""

    num_left: int
    readers: list[Reader]
    jobs: list[Job] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    _events: deque[tuple[int, Event]] = field(default_factory=deque)
    _arrival: "asyncio.Future[None] | None" = None

    @classmethod
    def start(
        cls, scheduler: Scheduler, deliveries: Deliveries, requests: Sequence[tuple[Request, Reader]]
    ) -> "Generation":
        """Submit requests together: all of them, or none.

        Raises:
            RequestError, OverloadedError: as `Scheduler.submit`.
        """
        deliveries.receive_on(asyncio.get_running_loop())
        generation = cls(len(requests), [reader for _, reader in requests])

        try:
            for index, (request, reader) in enumerate(requests):
                post = partial(deliveries.post, generation._arrive, index)
                generation.jobs.append(scheduler.submit(request, _Choice(reader, post)))
        except BaseException:
            generation.cancel()
            raise
        return generation

    @property
    def is_done(self) -> bool:
        """Whether every answer has ended."""
        return self.num_left == 0

    async def next(self, timeout_s: float | None = None) -> tuple[int, Event] | None:
        """The next event and the choice it belongs to; None when none came in time.

        Raises:
            Exception: what a request failed with.
        """
        if not self._events and not await self._wait(timeout_s):
            return None
        index, event = self._events.popleft()
        if isinstance(event, Ended):
            self.num_left -= 1
            self.results.append(event.result)
            if event.result.error is not None:
                raise event.result.error
        return index, event

    async def _wait(self, timeout_s: float | None) -> bool:
        """Whether an event came in time. Of one task only; lighter than a queue, for it is waited on for each token."""
        loop = asyncio.get_running_loop()
        self._arrival = arrival = loop.create_future()
        alarm = None if timeout_s is None else loop.call_later(max(timeout_s, 0), _set, arrival)
        try:
            await arrival
        finally:
            self._arrival = None
            if alarm is not None:
                alarm.cancel()
        return bool(self._events)

    def _arrive(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        if self._arrival is not None:
            _set(self._arrival)

    def cancel(self) -> None:
        """End what has not ended. May be called at any time, and again."""
        for job in self.jobs:
            if job.result.finish_reason is None:
                job.cancel()

    def usage(self) -> dict[str, int]:
        """Tokens of the answers that have ended; a prompt asked n times counts once."""
        prompts = {id(job.request.prompt_ids): job.result for job in reversed(self.jobs)}
        return {
            "prompt": sum(result.prompt_tokens for result in prompts.values()),
            "cached": sum(result.reused_tokens for result in prompts.values()),
            "completion": sum(result.completion_tokens for result in self.results),
            "reasoning": sum(reader.num_reasoning for reader in self.readers),
        }

    def log_entry(self) -> dict[str, object]:
        """What the access log tells of it."""
        used = self.usage()
        results = [job.result for job in self.jobs]
        first = [result.first_token_s for result in results if result.first_token_s is not None]
        return {
            "prompt_tokens": used["prompt"],
            "cached_tokens": used["cached"],
            "completion_tokens": sum(result.completion_tokens for result in results),
            "first_token_s": round(min(first), 4) if first else None,
            "finish": [result.finish_reason or "cancelled" for result in results],
        }


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
