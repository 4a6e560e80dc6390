"""A tool call's arguments from text to the types that the tool's schema names."""

import json
import math
from collections.abc import Mapping
from typing import Any

_JSON_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_PYTHON_SPELLINGS = {"True": True, "False": False, "None": None}


def properties_by_tool(tools: Any) -> dict[str, Mapping[str, Any]]:
    """The parameters' schemas of each tool by its name; tools in another shape than OpenAI's are left out."""
    found = {}
    for tool in tools or ():
        function = _field(tool, "function") or tool
        name = _field(function, "name")
        properties = _field(_field(function, "parameters"), "properties")
        if isinstance(name, str) and isinstance(properties, Mapping):
            found[name] = properties
    return found


def typed_argument(text: str, schema: Any) -> Any:
    """The value that a model wrote as text.

    Where the schema allows a string, it is the text itself (or None for "null" where that is allowed). Else it is
    the JSON value when the text is one of an allowed type; without a schema, when it is JSON of any type but string.
    Whatever does not fit stays text: the tool can answer better than a parser. Numbers that JSON cannot hold (NaN,
    infinities) stay text too.
    """
    allowed = _allowed_types(schema)
    if "string" in allowed:
        return None if "null" in allowed and text.strip() in ("null", "None") else text
    stripped = text.strip()
    if stripped in _PYTHON_SPELLINGS:
        value = _PYTHON_SPELLINGS[stripped]
    else:
        try:
            value = json.loads(stripped, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            return text
    kind = _JSON_TYPES[type(value)]
    if kind == "string" or (allowed and kind not in allowed and not (kind == "integer" and "number" in allowed)):
        return text
    return value


def _allowed_types(schema: Any) -> set[str]:
    """The JSON types a schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    allowed = {name for name in (named, *_items(named)) if isinstance(name, str)}
    for choice in (*_items(schema.get("anyOf")), *_items(schema.get("oneOf"))):
        allowed |= _allowed_types(choice)
    if not allowed:
        values = [schema["const"]] if "const" in schema else _items(schema.get("enum"))
        allowed = {_JSON_TYPES[type(value)] for value in values if type(value) in _JSON_TYPES}
    return allowed


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _items(value: Any) -> list[Any]:
    """The list itself, or nothing where a client sent something else."""
    return value if isinstance(value, list) else []


def _refuse(name: str) -> None:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value
