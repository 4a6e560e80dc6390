"""A model's text, as it arrives, to reasoning, content, and tool calls."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from glm_gpu.chat.arguments import properties_by_tool, typed_argument
from glm_gpu.chat.stop import longest_beginning_at_end
from glm_gpu.chat.tags import CALL, END_CALL, END_KEY, END_THINK, END_VALUE, KEY, THINK, VALUE

_ARGUMENT = re.compile(rf"\s*{KEY}(?P<key>.*?){END_KEY}\s*{VALUE}(?P<value>.*?)(?:{END_VALUE}|\Z)\s*", re.DOTALL)
_NAME = re.compile(r"[^\s<>{}\"]+")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for, whole: `arguments` is a JSON object, {} when the model gave none."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Delta:
    """What a piece of text added: some `text` of reasoning or content, or one whole tool `call`."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True)
class Reply:
    """All deltas of a reply put together."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> "Reply":
        """The reply that these deltas make up."""
        deltas = list(deltas)
        texts = {kind: "".join([d.text for d in deltas if d.kind == kind]) for kind in ("reasoning", "content")}
        return cls(texts["reasoning"], texts["content"], tuple(d.call for d in deltas if d.call is not None))


class ReplyParser:
    """Takes text in pieces of any size; the deltas put together do not depend on where it was cut.

    - White space around reasoning and around what follows a tag is dropped; all other white space stays.
    - `<tool_call>` ends reasoning. A call is given once, when it is complete, with its arguments typed by the tool's
      schema; inside a value `</tool_call>` is text.
    - What only begins like a tag is text. A call that is cut off or has no name is given as content, tags and all.

    Args:
        tools: the tool definitions of the request, or None.
        in_reasoning: the prompt ended inside `<think>`, see `ends_in_reasoning`.
    """

    def __init__(self, tools: Any = None, in_reasoning: bool = False) -> None:
        self._properties = properties_by_tool(tools)
        self._state: Literal["reasoning", "content", "call", "value"] = "reasoning" if in_reasoning else "content"
        self._after_tag = in_reasoning  # white space is dropped until something else comes
        self._held = ""  # an end that may begin a tag
        self._blank = ""  # white space that is dropped if a tag follows
        self._call: list[str] = []  # the pieces of the call so far, tags included

    def push(self, text: str) -> list[Delta]:
        """What this piece adds, in order."""
        deltas: list[Delta] = []
        text = self._held + text
        at = 0
        while match := _TAGS[self._state].search(text, at):
            self._take_text(text[at : match.start()], deltas)
            self._take_tag(match.group(), deltas)
            at = match.end()
        end = len(text) - longest_beginning_at_end(text[at:], _TAG_NAMES[self._state])
        self._take_text(text[at:end], deltas)
        self._held = text[end:]
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, as no more text comes."""
        deltas: list[Delta] = []
        while self._state in ("call", "value"):
            # The call was cut off, or a value was never closed and swallowed what follows.
            text = "".join(self._call) + self._held
            self._call, self._held, self._state = [], "", "content"
            body, end, rest = text.removeprefix(CALL).partition(END_CALL)
            if end:
                self._end_call(body, deltas)
                deltas += self.push(rest)
            else:
                self._take_text(text, deltas)
        self._take_text(self._held, deltas)
        if self._state == "content" and self._blank and not self._after_tag:
            deltas.append(Delta("content", self._blank))
        self._held = self._blank = ""
        return deltas

    def _take_text(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._state in ("call", "value"):
            self._call.append(text)
            return
        if self._after_tag:
            text = text.lstrip()
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._after_tag = False
            deltas.append(Delta(self._state, shown))

    def _take_tag(self, tag: str, deltas: list[Delta]) -> None:
        if self._state in ("call", "value"):
            if tag == END_CALL:
                body = "".join(self._call).removeprefix(CALL)
                self._call, self._state = [], "content"
                self._end_call(body, deltas)
            else:
                self._call.append(tag)
                self._state = "value" if tag == VALUE else "call"
            return
        self._blank, self._after_tag = "", True
        if tag == CALL:
            self._call, self._state = [tag], "call"
        else:
            self._state = "reasoning" if tag == THINK else "content"

    def _end_call(self, body: str, deltas: list[Delta]) -> None:
        call = self._parse_call(body)
        if call is None:
            self._take_text(f"{CALL}{body}{END_CALL}", deltas)
        else:
            deltas.append(Delta("tool_call", call=call))
            self._blank, self._after_tag = "", True

    def _parse_call(self, body: str) -> ToolCall | None:
        name = body.partition(KEY)[0]
        if not _NAME.fullmatch(name.strip()):
            return None
        properties = self._properties.get(name.strip(), {})
        arguments = {}
        at = len(name)
        while at < len(body):
            match = _ARGUMENT.match(body, at)
            if match is None:
                return None
            key = match["key"].strip()
            arguments[key] = typed_argument(match["value"], properties.get(key))
            at = match.end()
        return ToolCall(name.strip(), arguments)


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a prompt leaves `<think>` open, so that the reply begins with reasoning."""
    return prompt.rstrip().endswith(THINK)


def parse_reply(text: str, tools: Any = None, in_reasoning: bool = False) -> Reply:
    """The reply that a whole text holds, see `ReplyParser`."""
    parser = ReplyParser(tools, in_reasoning)
    return Reply.of(parser.push(text) + parser.finish())


_TEXT_TAGS = (THINK, END_THINK, CALL)
_TAG_NAMES = {"reasoning": _TEXT_TAGS, "content": _TEXT_TAGS, "call": (VALUE, END_CALL), "value": (END_VALUE,)}
_TAGS = {state: re.compile("|".join(names)) for state, names in _TAG_NAMES.items()}
