"""Grammars of replies: calls of the given tools, and constraints that wait for reasoning to end."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from glm_gpu.chat.arguments import typed_argument
from glm_gpu.chat.tags import CALL, END_CALL, END_KEY, END_VALUE, KEY, VALUE
from glm_gpu.errors import RequestError
from glm_gpu.grammar import Constraint, Grammar

# Tags are tokens of their own, which no pattern of text matches: so text ends at the first one.
_TEXT = r"/(.|\n)*/"


class AfterReasoning:
    """A constraint on what follows `</think>`; until then anything may come but the end of the answer."""

    def __init__(self, constraint: Constraint, end_think_id: int | None) -> None:
        self._constraint = constraint
        self._end_think_id = end_think_id
        self.end_ids = constraint.end_ids
        self._barred = sorted(constraint.end_ids)
        self._is_reasoning = end_think_id is not None

    @property
    def is_complete(self) -> bool:
        return not self._is_reasoning and self._constraint.is_complete

    def mask(self, logits: np.ndarray) -> np.ndarray:
        if not self._is_reasoning:
            return self._constraint.mask(logits)
        logits = logits.copy()
        logits[self._barred] = -np.inf
        return logits

    def push(self, token_id: int) -> None:
        if not self._is_reasoning:
            self._constraint.push(token_id)
        elif token_id == self._end_think_id:
            self._is_reasoning = False

    def forced(self, limit: int) -> list[int]:
        return [] if self._is_reasoning else self._constraint.forced(limit)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        if not self._is_reasoning:
            return self._constraint.num_valid(token_ids)
        for n, token_id in enumerate(token_ids):
            if token_id in self.end_ids:
                return n
            if token_id == self._end_think_id:
                return n + 1 + self._constraint.num_valid(token_ids[n + 1 :])
        return len(token_ids)


def tool_call_grammar(tools: Sequence[dict[str, Any]], max_calls: int | None) -> Grammar:
    """A reply that is nothing but calls of these tools, at least one, in GLM's markup.

    Arguments come in the order of the schema's properties, the required ones always. Text is free up to the closing
    tag; every other type is JSON that its schema allows.

    Raises:
        RequestError: a schema cannot be enforced.
    """
    from llguidance import LLMatcher

    rules, names = [], []
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {}
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise RequestError(f"tools[{i}].function.parameters: properties must be an object and required a list")
        parts = [CALL, json.dumps(function["name"])]
        for j, (key, value) in enumerate(properties.items()):
            text = _value(value, definitions)
            rules.append(f"argument_{i}_{j}: {KEY} {json.dumps(key)} {END_KEY} {VALUE} {text} {END_VALUE}")
            parts.append(f"argument_{i}_{j}" + ("" if key in required else "?"))
        names.append(f"call_{i}")
        rules.append(f"call_{i}: {' '.join([*parts, END_CALL])}")
    one = f"({' | '.join(names)})"
    start = f"start: {one}" + ("" if max_calls == 1 else "+")
    return Grammar(LLMatcher.grammar_from_lark("\n".join([start, *rules])), "tools: their schemas")


def _value(schema: Any, definitions: dict[str, Any]) -> str:
    """What stands between the tags of one argument."""
    if isinstance(schema, dict):
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        choices = choices if isinstance(choices, list) else []
        if choices and all(isinstance(choice, str) for choice in choices):
            return "(" + " | ".join(json.dumps(choice) for choice in choices) + ")"
        if typed_argument("7", schema) != "7":
            return "%json " + json.dumps({**schema, **definitions})
    return _TEXT
