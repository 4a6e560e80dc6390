"""OpenAI's responses, text only: the same chats under newer names."""

import time
import uuid
from typing import Any

from glm_gpu.server import sse
from glm_gpu.server.chat_completions import sampling_values
from glm_gpu.server.generation import Ended, Event, Generation, Piece
from glm_gpu.server.problems import ApiError
from glm_gpu.server.questions import Chat, Sampling
from glm_gpu.server.schemas import ResponsesBody

_MESSAGE_FIELDS = ("role", "content")


def response_of(body: ResponsesBody) -> tuple[Chat, Sampling]:
    """What a body asks.

    Raises:
        ApiError: something that this interface does not have here; chat completions may.
    """
    if body.previous_response_id is not None:
        field = "previous_response_id"
        raise ApiError(400, f"{field}: responses are not stored; send the whole conversation as input", field)
    if body.tools:
        raise ApiError(400, "tools: this interface is text only here; use /v1/chat/completions", "tools")
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    if body.instructions:
        items.insert(0, {"role": "system", "content": body.instructions})
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ApiError(400, "reasoning.effort: expected text", "reasoning.effort")
    values = {} if effort is None else {"reasoning_effort": effort}
    chat = Chat(
        items,
        schema=_schema((body.text or {}).get("format")),
        enable_thinking=None if effort is None else effort != "none",
        template_values=values,
    )
    return chat, Sampling(sampling_values(body), body.max_output_tokens)


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = []
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind != "message":
            raise ApiError(400, f"input[{i}].type: {str(kind)[:50]!r}, expected message", f"input[{i}].type")
        messages.append({name: item[name] for name in _MESSAGE_FIELDS if name in item})
    return messages


def _schema(format: Any) -> dict[str, Any] | None:
    kind = format.get("type") if isinstance(format, dict) else None if format is None else "?"
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema" or not isinstance(format.get("schema"), dict):
        message = "text.format: expected type text, json_object, or json_schema with a schema"
        raise ApiError(400, message, "text.format")
    return format["schema"] or {"type": "object"}


class ResponseAnswer:
    """One chat's events in the shapes of this interface, streamed or whole."""

    def __init__(self, generation: Generation, model: str, body: ResponsesBody) -> None:
        self._generation, self._body, self._model = generation, body, model
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = 0
        self._text: list[str] = []
        self._reason = "stop"

    def opening(self) -> list[str]:
        """The events before any text."""
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def encode(self, index: int, event: Event) -> list[str]:
        """The text of an event; reasoning is not shown here."""
        assert isinstance(event, Piece | Ended)
        if isinstance(event, Ended):
            self._reason = event.finish_reason
        texts = [delta.text for delta in event.deltas if delta.kind == "content"]
        self._text += texts
        return [self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[]) for text in texts]

    def closing(self) -> list[str]:
        """The events that put it together."""
        text = "".join(self._text)
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._item()),
            self._event(kind, response=self._response(self._status)),
        ]

    async def whole(self) -> dict[str, Any]:
        """The answer as one object.

        Raises:
            Exception: what the request failed with.
        """
        while not self._generation.is_done:
            index, event = await self._generation.next()
            if isinstance(event, Piece | Ended):
                self.encode(index, event)
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse.data({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _item(self) -> dict[str, Any]:
        parts = [_part("".join(self._text))]
        return {
            "id": self._message_id, "type": "message", "role": "assistant", "status": self._status, "content": parts,
        }  # fmt: skip

    def _response(self, status: str) -> dict[str, Any]:
        is_done = status != "in_progress"
        used, body = self._generation.usage(), self._body
        account = {
            "input_tokens": used["prompt"],
            "input_tokens_details": {"cached_tokens": used["cached"], "cache_write_tokens": 0},
            "output_tokens": used["completion"],
            "output_tokens_details": {"reasoning_tokens": used["reasoning"]},
            "total_tokens": used["prompt"] + used["completion"],
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [self._item()] if is_done else [],
            "usage": account if is_done else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
