"""/v1/chat/completions through OpenAI's own client, against a live server."""

import json

import openai as sdk
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)


def joined(chunks):
    """A stream's deltas put together: (reasoning, content, calls, finish reason)."""
    reasoning, content, calls, reason = [], [], [], None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            reasoning.append(getattr(delta, "reasoning_content", None) or "")
            content.append(delta.content or "")
            calls += [(c.index, c.function.name, c.function.arguments) for c in delta.tool_calls or []]
            reason = choice.finish_reason or reason
    return "".join(reasoning), "".join(content), calls, reason


def whole(completion):
    message = completion.choices[0].message
    calls = [(i, c.function.name, c.function.arguments) for i, c in enumerate(message.tool_calls or [])]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return reasoning, message.content or "", calls, completion.choices[0].finish_reason


def test_an_answer_with_its_account(served, ask):
    served.says = "And God said, Let there be light."
    completion = ask()
    assert whole(completion) == ("", "And God said, Let there be light.", [], "stop")
    used = completion.usage
    assert completion.model == "demo" and completion.choices[0].logprobs is None
    assert used.completion_tokens == len(served.engine.tokenizer.encode(served.says))
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        ("In the beginning was the Word", {}),
        ("👩‍👩‍👧 ёжик 漢字 – and “so” on", {}),
        ("cut short by its length", {"max_tokens": 3}),
        ("one, two, three, four", {"stop": ["three", "for"]}),
        ("because of this</think>\nthus it is", {"reasoning_effort": "high"}),
        ("why not</think>", {"extra_body": {"thinking": {"type": "enabled"}}}),
        (CALL, {"tools": [TOOL]}),
        ("I shall look." + CALL + CALL, {"tools": [TOOL]}),
        ("I shall look." + CALL + CALL, {"tools": [TOOL], "parallel_tool_calls": False}),
        ("let me see" + CALL, {"tools": [TOOL], "reasoning_effort": "low"}),
        ("<tool_call>get_weather</tool_call>", {"tools": [TOOL]}),
        ("two <of> them", {"n": 1, "seed": 5}),
        ('{"a": [1, 2]}', {"response_format": {"type": "json_object"}}),
    ],
)
def test_a_stream_joined_is_the_plain_answer(served, ask, says, fields):
    served.says = says
    plain, chunks = ask(**fields), list(ask(stream=True, **fields))
    assert joined(chunks) == whole(plain)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert plain.choices[0].message.content is not None or plain.choices[0].message.tool_calls


def test_reasoning_is_apart_when_asked_for_and_absent_when_not(served, ask):
    served.says = "because</think>\nthus"
    completion = ask(reasoning_effort="high")
    assert whole(completion)[:2] == ("because", "thus")
    assert completion.usage.completion_tokens_details.reasoning_tokens >= 1
    served.says = "thus"
    for fields in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        assert whole(ask(**fields))[:2] == ("", "thus")


def test_a_stream_accounts_for_its_tokens_when_asked(served, ask):
    served.says = "short"
    *chunks, last = list(ask(stream=True, stream_options={"include_usage": True}))
    assert last.choices == [] and last.usage.completion_tokens == len(served.engine.tokenizer.encode("short"))
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.usage is None and chunk.choices for chunk in ask(stream=True))


def test_a_tool_s_round_trip(served, ask):
    """C44."""
    messages = [{"role": "user", "content": "Weather in Paris?"}]
    served.says = CALL
    first = ask(messages=messages, tools=[TOOL])
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris", "days": 3})
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content is None
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    served.says = "It is sunny."
    assert whole(ask(messages=messages, tools=[TOOL]))[1] == "It is sunny."
    prompt = served.engine.tokenizer.decode(served._prompts[-1], special=True)
    assert "<tool_call>get_weather" in prompt and "<tool_response>\nsunny\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_forced_call_is_a_valid_call_whatever_the_model_would_say(served, ask, choice, names, thinks):
    served.says = "I would rather talk.</think>Really."
    days = {"type": "object", "properties": {"days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["days", "unit"]}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": days}},
             {"type": "function", "function": {"name": "now"}}]  # fmt: skip
    fields = {"tools": tools, "tool_choice": choice, "temperature": 1, "seed": 3, "parallel_tool_calls": False}
    completion = ask(**fields, reasoning_effort="high" if thinks else "none", max_tokens=400)
    reasoning, content, calls, reason = whole(completion)
    assert (reason, content) == ("tool_calls", "") and bool(reasoning) == thinks
    ((_, name, arguments),) = calls
    assert name in names
    if name == "get_weather":
        parsed = json.loads(arguments)
        assert type(parsed["days"]) is int and parsed["unit"] in ("C", "F")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_that_the_limit_cuts_off_is_no_call_and_says_why(served, ask, choice):
    """A text argument may be of any length; what came of the call is shown, for half a call must not be made."""
    served.says = "a city of a name that goes on and on and on"
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 12}
    plain = whole(ask(**fields))
    assert plain[2:] == ([], "length") and plain[1].startswith("<tool_call>get_weather<arg_key>")
    assert joined(ask(**fields, stream=True)) == plain


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "none"}, {}])
def test_a_model_without_tools_calls_none(served, ask, fields):
    served.says = CALL
    assert whole(ask(**fields, max_tokens=20))[2] == []


def test_a_schema_is_kept_whatever_the_model_would_say(served, ask):
    served.says = "Certainly! Here is the JSON you asked for"
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for fields in ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}):
        served.says = "Certainly!</think>" if fields["reasoning_effort"] == "high" else "Certainly!"
        parsed = json.loads(whole(ask(response_format=format, **fields))[1])
        assert parsed["name"] in ("Ann", "Bo") and 1 <= parsed["age"] <= 99 and len(parsed) == 2


@pytest.mark.parametrize("says", ["own fox is brown fox", "the brown fox"])
def test_nothing_of_a_stop_string_is_shown(served, ask, says):
    """C35."""
    served.says = "the quick br" + says
    for stream in (False, True):
        answer = ask(stop=["own fox", "own foxes", "never"], stream=stream)
        _, content, _, reason = joined(answer) if stream else whole(answer)
        assert content == served.says.partition("own fox")[0] and reason == "stop"


def test_a_stop_string_is_found_in_reasoning_too(served, ask):
    """C35."""
    served.says = "first, second, third</think>never"
    assert whole(ask(reasoning_effort="high", stop="second"))[:2] == ("first,", "")


@pytest.mark.parametrize("token", ["<|user|>", "<|observation|>", "<|endoftext|>"])
def test_every_end_token_ends_a_chat_and_none_is_shown(served, ask, token):
    """C37."""
    served.says = f"one two three{token}never"
    assert whole(ask()) == ("", "one two three", [], "stop")


def test_several_answers_share_a_prompt_and_differ(served, ask):
    completion = ask(n=3, temperature=1.5, seed=1, max_tokens=6)
    texts = [choice.message.content for choice in completion.choices]
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    again = [choice.message.content for choice in ask(n=3, temperature=1.5, seed=1, max_tokens=6).choices]
    assert texts == again
    assert completion.usage.completion_tokens <= 18
    indexes = {choice.index for chunk in ask(n=3, stream=True, max_tokens=4) for choice in chunk.choices}
    assert indexes == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0, 1e-6, 1, 2])
@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_log_probabilities_are_the_model_s_own_and_the_same_in_a_stream(served, ask, temperature, top):
    """C47."""
    served.says = "ab"
    fields = {"logprobs": True, "temperature": temperature, "seed": 2, "max_tokens": 2}
    fields |= {} if top is None else {"top_logprobs": top}
    plain = ask(**fields).choices[0].logprobs.content
    streamed = [c for chunk in ask(stream=True, **fields) for ch in chunk.choices if ch.logprobs
                for c in ch.logprobs.content]  # fmt: skip
    assert plain == streamed and len(plain) in (1, 2)
    for entry in plain:
        assert bytes(entry.bytes).decode() == entry.token and entry.logprob <= 0
        assert len(entry.top_logprobs) == (top or 0)
        values = [alternative.logprob for alternative in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    if temperature == 0 and top:
        assert plain[0].top_logprobs[0].logprob == plain[0].logprob


def test_bias_and_limits(served, ask):
    served.says = "wanted"
    token_id = served.engine.tokenizer.encode("!")[0]
    assert whole(ask(logit_bias={str(token_id): 100}, max_tokens=3))[1] == "!!!"
    completion = ask(max_tokens=10**9)
    assert completion.choices[0].finish_reason == "stop"
    served.says = "a " * 3000
    completion = ask(max_completion_tokens=10**9)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.total_tokens == served.engine.context


def test_the_same_prompt_again_is_cached_and_answered_alike(served, ask):
    """C42."""
    served.says = None
    messages = [{"role": "user", "content": "tell me " * 30}]
    first, second, third = (ask(messages=messages, max_tokens=8) for _ in range(3))
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == second.usage.prompt_tokens - 1
    assert whole(first) == whole(second) == whole(third)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"reasoning_effort": "frantic"}, "reasoning_effort"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_bad_field_is_named(ask, fields, param):
    for stream in (False, True):
        with pytest.raises(sdk.BadRequestError) as caught:
            ask(**fields, stream=stream)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert param.rpartition(".")[2].partition("[")[0] in caught.value.message


def test_another_model_s_name_is_refused(ask, openai):
    with pytest.raises(sdk.NotFoundError, match="'demo' is"):
        ask(model="gpt-4")
    assert [model.id for model in openai.models.list()] == ["demo"]
    assert openai.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_prompt_that_fills_the_context_is_refused_with_both_counts(served, openai, over):
    """C38."""
    context = served.engine.context
    for stream in (False, True):
        fields = {"model": "demo", "prompt": [5] * (context + over), "stream": stream, "max_tokens": 100}
        if over < 0:
            answer = openai.completions.create(**fields)
            reasons = [c.choices[0].finish_reason for c in answer] if stream else [answer.choices[0].finish_reason]
            assert reasons[-1] == "length"
            continue
        with pytest.raises(sdk.BadRequestError) as caught:
            openai.completions.create(**fields)
        assert caught.value.code == "context_length_exceeded"
        assert f"{context + over} tokens" in str(caught.value) and f"holds {context}" in str(caught.value)
