"""Chat messages as SDKs send them, brought to the one form that templates are given."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from glm_gpu.chat.tags import REPLY_TAGS
from glm_gpu.errors import RequestError

# `developer` is OpenAI's newer name of `system`, `function` its older one of `tool`; templates know the other two.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

Guard = Callable[[str, Collection[str]], str]


def prepare_messages(messages: Any, guard: Guard) -> list[dict[str, Any]]:
    """Messages in which `content` is a string, roles are the four known ones, and arguments are objects.

    Args:
        messages: as JSON gave them. `content` may be a string, null, missing, or a list of text parts; arguments of
            tool calls may be JSON text or an object. Fields that are not known stay.
        guard: makes control tokens in outside text harmless. An assistant's own text keeps `<think>` and the tags of
            tool calls, which templates look for.

    Raises:
        RequestError: a message is malformed or holds what is not text; the message says which one.
    """
    if not _is_list(messages) or not messages:
        raise RequestError("messages: expected a list of at least one message")
    return [_prepare_message(message, f"messages[{i}]", guard) for i, message in enumerate(messages)]


def prepare_tools(tools: Any, guard: Guard) -> list[dict[str, Any]] | None:
    """The tool definitions with control tokens made harmless, or None when there are none.

    Raises:
        RequestError: not a list of objects.
    """
    if tools is None or tools == []:
        return None
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools: expected a list of objects")
    return _guarded(tools, guard, ())


def _prepare_message(message: Any, where: str, guard: Guard) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected an object with role and content, found {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}, expected system, developer, user, assistant, or tool")
    prepared = dict(message)
    prepared["content"] = _text(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls:
        if not _is_list(calls):
            raise RequestError(f"{where}.tool_calls: expected a list, found {type(calls).__name__}")
        prepared["tool_calls"] = [_prepare_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    else:
        prepared.pop("tool_calls", None)
    prepared.pop("function_call", None)
    if isinstance(message.get("reasoning"), str):
        prepared.setdefault("reasoning_content", message["reasoning"])
    prepared = _guarded(prepared, guard, REPLY_TAGS if role == "assistant" else ())
    prepared["role"] = _ROLES[role]
    return prepared


def _prepare_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object whose function has a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(f"{where}: arguments of {function['name']!r} are not valid JSON ({error})") from None
    if arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}: arguments of {function['name']!r} are no JSON object: {type(arguments).__name__}")
    return {"id": call.get("id"), "type": "function", "function": {**function, "arguments": dict(arguments)}}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise RequestError(f"{where}: expected a string or a list of text parts, found {type(content).__name__}")
    return "".join([_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)])


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestError(f"{where}: a part of type {kind!r}; this model reads text only, send parts of type 'text'")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}: a text part without text; expected a string, found {type(text).__name__}")
    return text


def _guarded(value: Any, guard: Guard, keep: Collection[str]) -> Any:
    if isinstance(value, str):
        return guard(value, keep)
    if isinstance(value, Mapping):
        return {_guarded(key, guard, keep): _guarded(item, guard, keep) for key, item in value.items()}
    if _is_list(value):
        return [_guarded(item, guard, keep) for item in value]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
