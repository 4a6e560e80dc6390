"""Anthropic's messages: content in blocks, tools by input_schema, and a stream of block events."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from glm_gpu.chat import Delta
from glm_gpu.server import sse
from glm_gpu.server.chat_completions import plain, sampling_values
from glm_gpu.server.generation import Ended, Event, Generation, Piece
from glm_gpu.server.problems import ApiError
from glm_gpu.server.questions import Chat, Sampling
from glm_gpu.server.schemas import CountBody, MessagesBody

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_of(body: MessagesBody) -> tuple[Chat, Sampling]:
    """What a body asks.

    Raises:
        ApiError: blocks or choices that there are not here.
    """
    choice = body.tool_choice or {"type": "auto"}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": choice.get("name")}
    named = kinds.get(choice.get("type")) if isinstance(choice.get("type"), str) else None
    if not isinstance(named, str):
        raise ApiError(400, "tool_choice: expected type auto, any, none, or tool with a name", "tool_choice")
    chat = Chat(
        _messages(plain(body.messages), body.system),
        [_tool(tool, i) for i, tool in enumerate(body.tools)],
        named,
        choice["type"] == "tool" if body.tool_choice else False,
        max_calls=1 if choice.get("disable_parallel_tool_use") else None,
        enable_thinking=None if body.thinking is None else body.thinking.type != "disabled",
    )
    return chat, Sampling(sampling_values(body), body.max_tokens, stops=body.stop_sequences or [])


def counted_chat(body: CountBody) -> Chat:
    """The chat whose prompt is to be counted.

    Raises:
        ApiError: as for messages.
    """
    thinking = None if body.thinking is None else body.thinking.type != "disabled"
    tools = [_tool(tool, i) for i, tool in enumerate(body.tools)]
    return Chat(_messages(plain(body.messages), body.system), tools, enable_thinking=thinking)


def _messages(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Messages in OpenAI's shapes: tool results become messages of their own."""
    found = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message["role"] not in ("user", "assistant", "system"):
            raise ApiError(400, f"{where}.role: {message['role'][:50]!r}, expected user or assistant", f"{where}.role")
        content = message.get("content")
        if not isinstance(content, list):
            found.append(message)
            continue
        found += _from_blocks(message["role"], content, where)
    return found


def _from_blocks(role: str, blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    texts, calls, results, reasoning = [], [], [], []
    for j, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        match kind:
            case "text":
                texts.append(block)
            case "thinking":
                reasoning.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                id_ = block.get("tool_use_id")
                results.append({"role": "tool", "tool_call_id": id_, "content": block.get("content")})
            case _:
                message = f"{where}.content[{j}]: a block of type {str(kind)[:50]!r}; this model reads text and tools"
                raise ApiError(400, message, f"{where}.content[{j}]")
    if texts or calls or not results:
        message = {"role": role, "content": texts, "reasoning_content": "".join(reasoning)}
        results.append({**message, "tool_calls": calls} if calls else message)
    return results


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        message = f"tools[{index}].type: {str(tool['type'])[:50]!r}; only tools with an input_schema can be called here"
        raise ApiError(400, message, f"tools[{index}].type")
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


class MessageAnswer:
    """One chat's events in the shapes of Anthropic's interface, streamed or whole."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation, self._model = generation, model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._ended: Ended | None = None

    def opening(self) -> list[str]:
        """The event before any block."""
        used = {"input_tokens": self._generation.usage()["prompt"], "output_tokens": 0}
        message = {**self._message(), "content": [], "usage": used}
        return [sse.data({"type": "message_start", "message": message}, "message_start")]

    def encode(self, index: int, event: Event) -> list[str]:
        """The block events of an event."""
        assert isinstance(event, Piece | Ended)
        if isinstance(event, Ended):
            self._ended = event
        return [part for delta in event.deltas for part in self._add(delta)]

    def closing(self) -> list[str]:
        """The end of the last block and of the message."""
        parts = self._stop_block()
        message = self._message()
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        used = {"output_tokens": self._generation.usage()["completion"]}
        parts.append(sse.data({"type": "message_delta", "delta": delta, "usage": used}, "message_delta"))
        return [*parts, sse.data({"type": "message_stop"}, "message_stop")]

    async def whole(self) -> dict[str, Any]:
        """The message as one object.

        Raises:
            Exception: what the request failed with.
        """
        while not self._generation.is_done:
            index, event = await self._generation.next()
            if isinstance(event, Piece | Ended):
                self.encode(index, event)
        used = self._generation.usage()
        account = {
            "input_tokens": used["prompt"] - used["cached"],
            "cache_read_input_tokens": used["cached"],
            "cache_creation_input_tokens": 0,
            "output_tokens": used["completion"],
        }
        return {**self._message(), "content": self._blocks, "usage": account}

    def _message(self) -> dict[str, Any]:
        reason = stop = None
        if self._ended is not None:
            stop = self._ended.stop
            reason = "stop_sequence" if stop is not None else _STOP_REASONS.get(self._ended.finish_reason, "end_turn")
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "stop_reason": reason, "stop_sequence": stop,
        }  # fmt: skip

    def _add(self, delta: Delta) -> list[str]:
        if delta.call is not None:
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": delta.call.name}
            parts = self._start_block({**block, "input": {}})
            self._blocks[-1]["input"] = delta.call.arguments
            text = json.dumps(delta.call.arguments, ensure_ascii=False)
            return [*parts, self._block_delta({"type": "input_json_delta", "partial_json": text})]
        kind, name = ("thinking", "thinking") if delta.kind == "reasoning" else ("text", "text")
        parts = []
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            parts = self._start_block({"type": kind, name: "", **signature})
        self._blocks[-1][name] += delta.text
        return [*parts, self._block_delta({"type": f"{kind}_delta", name: delta.text})]

    def _start_block(self, block: dict[str, Any]) -> list[str]:
        parts = self._stop_block()
        start = {"type": "content_block_start", "index": len(self._blocks), "content_block": dict(block)}
        self._blocks.append(block)
        return [*parts, sse.data(start, "content_block_start")]

    def _block_delta(self, delta: dict[str, Any]) -> str:
        event = {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        return sse.data(event, "content_block_delta")

    def _stop_block(self) -> list[str]:
        if not self._blocks:
            return []
        stop = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        return [sse.data(stop, "content_block_stop")]
