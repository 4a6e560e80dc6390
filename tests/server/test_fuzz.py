"""Bodies made from the server's own schema, and broken ones: every answer is one the schema's reader can expect."""

import os

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import LONG_S

# GLM_GPU_FUZZ=100 tries a hundred times as many.
TIMES = int(os.environ.get("GLM_GPU_FUZZ", "1"))
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
         "/tokenize", "/detokenize"]  # fmt: skip
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(-5, 3000), max_size=4),
    st.dictionaries(st.text(max_size=4), st.none(), max_size=2),
)


def one_of(*values):
    """One of these values, or anything at all."""
    return st.one_of(st.sampled_from(values), ODD)


def made_of(optional=None, **required):
    return st.one_of(st.fixed_dictionaries(required, optional=optional or {}), ODD)


ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "other"])
PART = made_of(type=one_of("text", "image_url", "tool_result", "tool_use", "thinking"), optional={"text": ODD})
CALLS = one_of([{"function": {"name": "f", "arguments": "{}"}}], [{"function": {"name": "f", "arguments": "{"}}])
MESSAGE = made_of(
    {"tool_calls": CALLS}, role=ROLE, content=st.one_of(st.text(max_size=20), st.lists(PART, max_size=2), ODD)
)
PARAMETERS = st.one_of(
    made_of(properties=ODD, required=ODD),
    one_of(*({"properties": {"a": schema}} for schema in ({"type": "odd"}, {"type": "integer"}, {"$ref": "#/no"}))),
)
TOOL = made_of(
    {"name": one_of("f"), "input_schema": PARAMETERS},
    type=one_of("function", "custom"),
    function=made_of({"parameters": PARAMETERS}, name=one_of("f")),
)
SCHEMA = made_of(schema=one_of({"type": "integer"}, {"type": "object", "properties": {"a": {"const": 1}}}))
# Values that a generator of plain JSON would hardly ever hit.
LIKELY = {
    "messages": st.lists(MESSAGE, max_size=3),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": one_of(
        "auto", "none", "required", {"type": "any"}, {"type": "tool", "name": "f"},
        {"type": "function", "function": {"name": "f"}},
    ),
    "response_format": made_of({"json_schema": SCHEMA}, type=one_of("text", "json_object", "json_schema")),
    "prompt": st.one_of(st.text(max_size=20), st.lists(st.text(max_size=5), max_size=2), ODD),
    "input": st.one_of(st.text(max_size=20), st.lists(MESSAGE, max_size=2), ODD),
    "max_tokens": st.one_of(st.integers(0, 3), ODD),
    "max_output_tokens": st.one_of(st.integers(1, 3), ODD),
    "n": st.one_of(st.integers(1, 2), ODD),
    "stream": st.booleans(),
    "temperature": st.one_of(st.floats(0, 2), ODD),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=5), ODD),
    "logit_bias": st.one_of(st.dictionaries(st.integers(-1, 3000).map(str), st.floats(-200, 200), max_size=2), ODD),
    "thinking": one_of({"type": "enabled"}, {"type": "disabled"}),
    "tokens": st.one_of(st.lists(st.integers(-1, 3000), max_size=5), ODD),
    "chat_template_kwargs": one_of({"enable_thinking": True}, {"messages": []}),
}  # fmt: skip


@pytest.fixture(scope="module")
def schema(shared_server):
    return httpx.get(f"{shared_server.url}/openapi.json", timeout=LONG_S).json()


def fields(schema, path):
    reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return sorted(schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"])


@pytest.mark.parametrize("path", PATHS)
def test_no_body_is_an_error_of_the_server(shared_server, schema, path):
    names = fields(schema, path)
    required = {"messages", "prompt", "input", "tokens", "max_tokens"} & set(names)
    bodies = st.fixed_dictionaries(
        {name: LIKELY.get(name, ODD) for name in sorted(required)},
        optional={name: LIKELY.get(name, ODD) for name in names if name not in required},
    )
    with httpx.Client(base_url=shared_server.url, timeout=LONG_S) as client:

        @settings(max_examples=60 * TIMES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(body=st.one_of(bodies, bodies, ODD))
        def check(body):
            if isinstance(body, dict) and "max_tokens" in names:
                # Long answers would test patience only.
                body.setdefault("max_tokens", 3)
            answer = client.post(path, json=body)
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
            else:
                assert '"server_error"' not in answer.text and '"api_error"' not in answer.text

        check()
    assert shared_server.idle()
