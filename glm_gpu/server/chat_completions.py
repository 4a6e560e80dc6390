"""OpenAI's chat completions: a body to a chat, and a chat's events to chunks or one answer."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from glm_gpu.chat import Delta, ToolCall
from glm_gpu.jobs import Token
from glm_gpu.server import sse
from glm_gpu.server.generation import Ended, Event, Generation, Piece
from glm_gpu.server.problems import ApiError
from glm_gpu.server.questions import Chat, Sampling
from glm_gpu.server.schemas import Body, ChatBody, Message, OpenAIBody, ResponseFormat
from glm_gpu.tokenizer import Tokenizer

# What OpenAI writes for a probability of 0, as JSON has no infinity.
_MIN_LOGPROB = -9999.0
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def sampling_of(body: OpenAIBody, max_tokens: int | None, num_logprobs: int | None) -> Sampling:
    """What a body of one of OpenAI's older interfaces says of choosing tokens."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    names = ("seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
    values = {**sampling_values(body), **{name: getattr(body, name) for name in names}}
    return Sampling(
        values,
        max_tokens,
        body.n or 1,
        stops,
        body.logit_bias or {},
        num_logprobs,
        body.deadline_s,
        bool(body.ignore_eos),
    )


def sampling_values(body: Body) -> dict[str, float | int | None]:
    """The values that every interface has."""
    return {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the client sent them, fields it left out left out."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def schema_of(format: ResponseFormat | None) -> dict[str, Any] | None:
    """What an answer must conform to: {} for any JSON object, None for nothing.

    Raises:
        ApiError: a format that there is not, or no schema where one belongs.
    """
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return {}
    if format.type != "json_schema":
        message = f"response_format.type: {format.type[:50]!r}, expected text, json_object or json_schema"
        raise ApiError(400, message, "response_format.type")
    schema = (format.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        field = "response_format.json_schema.schema"
        raise ApiError(400, f"{field}: expected a JSON schema", field)
    return schema or {"type": "object"}


def chat_of(body: ChatBody) -> tuple[Chat, Sampling]:
    """What a body asks.

    Raises:
        ApiError: fields that contradict each other.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
    choice, is_named = _tool_choice(body.tool_choice)
    thinking, values = _thinking(body)
    chat = Chat(
        plain(body.messages),
        body.tools,
        choice,
        is_named,
        schema_of(body.response_format),
        None if body.parallel_tool_calls in (None, True) else 1,
        thinking,
        values,
    )
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return chat, sampling_of(body, min(limits, default=None), num_logprobs)


def _tool_choice(given: str | Mapping[str, Any] | None) -> tuple[str, bool]:
    if given is None:
        return "auto", False
    if isinstance(given, str):
        if given not in ("auto", "none", "required"):
            message = f"tool_choice: {given[:50]!r}, expected auto, none, required, or an object that names a function"
            raise ApiError(400, message, "tool_choice")
        return given, False
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type") != "function" or not isinstance(name, str):
        raise ApiError(400, "tool_choice: expected type 'function' with a function's name", "tool_choice")
    return name, True


def _thinking(body: ChatBody) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think, None if the template is to decide, and further variables of the template."""
    values = dict(body.chat_template_kwargs or {})
    reserved = values.keys() & {"messages", "tools", "add_generation_prompt"}
    if reserved or not all(key.isidentifier() for key in values):
        message = "chat_template_kwargs: expected names of variables other than messages, tools, add_generation_prompt"
        raise ApiError(400, message, "chat_template_kwargs")
    thinking = values.pop("enable_thinking", None)
    if thinking is not None and not isinstance(thinking, bool):
        field = "chat_template_kwargs.enable_thinking"
        raise ApiError(400, f"{field}: expected true or false", field)
    if body.thinking is not None:
        thinking = body.thinking.type != "disabled"
    if body.reasoning_effort is not None:
        if body.reasoning_effort not in _EFFORTS:
            message = f"reasoning_effort: {body.reasoning_effort[:50]!r}, expected one of {', '.join(_EFFORTS)}"
            raise ApiError(400, message, "reasoning_effort")
        values["reasoning_effort"] = body.reasoning_effort
        if thinking is None:
            thinking = body.reasoning_effort != "none"
    return thinking, values


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's account of tokens."""
    used = generation.usage()
    return {
        "prompt_tokens": used["prompt"],
        "completion_tokens": used["completion"],
        "total_tokens": used["prompt"] + used["completion"],
        "prompt_tokens_details": {"cached_tokens": used["cached"]},
        "completion_tokens_details": {"reasoning_tokens": used["reasoning"]},
    }


def logprob(value: float | None) -> float | None:
    """A log-probability that JSON can hold."""
    return None if value is None else max(value, _MIN_LOGPROB)


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


class ChatAnswer:
    """One chat's events in the shapes of OpenAI's interface, streamed or whole.

    Args:
        model: the name to give.
        has_logprobs: whether tokens carry them.
        shows_usage: whether a stream ends with an account of tokens.
    """

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, model: str, has_logprobs: bool, shows_usage: bool = False
    ) -> None:
        self._generation, self._tokenizer = generation, tokenizer
        self._has_logprobs, self._shows_usage = has_logprobs, shows_usage
        self._num_calls = [0] * generation.num_left
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self) -> list[str]:
        """Each choice's first chunk."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self._num_calls))]

    def encode(self, index: int, event: Event) -> list[str]:
        """The chunks of an event."""
        if isinstance(event, Piece):
            scored = [event.token] if self._has_logprobs else []
            return self._chunks(index, event.deltas, scored)
        assert isinstance(event, Ended)
        return [*self._chunks(index, event.deltas, []), self._chunk(index, {}, event.finish_reason)]

    def closing(self) -> list[str]:
        """What ends a stream."""
        total = {**self._stream_head(), "choices": [], "usage": usage(self._generation)}
        return [*([sse.data(total)] if self._shows_usage else []), "data: [DONE]\n\n"]

    async def whole(self) -> dict[str, Any]:
        """The answer as one object.

        Raises:
            Exception: what a request failed with.
        """
        choices = [_Whole() for _ in self._num_calls]
        while not self._generation.is_done:
            index, event = await self._generation.next()
            if isinstance(event, Piece):
                choices[index].add(event.deltas)
                choices[index].tokens.append(event.token)
            elif isinstance(event, Ended):
                choices[index].add(event.deltas)
                choices[index].finish_reason = event.finish_reason
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": self._logprobs(choice.tokens) if self._has_logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage(self._generation),
        }

    def _chunks(self, index: int, deltas: list[Delta], scored: list[Token]) -> list[str]:
        """One chunk a delta; the first carries the tokens' log-probabilities, if need be with no text."""
        parts: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.call is None:
                parts.append({"reasoning_content" if delta.kind == "reasoning" else "content": delta.text})
            else:
                parts.append({"tool_calls": [{"index": self._num_calls[index], **_call(delta.call)}]})
                self._num_calls[index] += 1
        if scored and not parts:
            parts.append({})
        return [self._chunk(index, part, None, [] if i else scored) for i, part in enumerate(parts)]

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, scored: list[Token] | None = None
    ) -> str:
        logprobs = self._logprobs(scored) if scored else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        extra = {"usage": None} if self._shows_usage else {}
        return sse.data({**self._stream_head(), "choices": [choice], **extra})

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = [self._scored(token_id, value) for token_id, value in token.top]
            content.append({**self._scored(token.id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _scored(self, token_id: int, value: float | None) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": logprob(value), "bytes": list(spelled)}


class _Whole:
    """One choice put together."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[dict[str, Any]] = []
        self.tokens: list[Token] = []
        self.finish_reason = "stop"

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.call is not None:
                self._calls.append(_call(delta.call))
            else:
                self._texts[delta.kind].append(delta.text)

    def message(self) -> dict[str, Any]:
        content = "".join(self._texts["content"])
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls and not content else content}
        if self._texts["reasoning"]:
            message["reasoning_content"] = "".join(self._texts["reasoning"])
        if self._calls:
            message["tool_calls"] = self._calls
        return message
