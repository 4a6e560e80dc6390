"""Replies to reasoning, content, and tool calls; stop strings."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_gpu.chat import (
    REPLY_TAGS,
    Reply,
    ReplyParser,
    StopMatcher,
    ToolCall,
    ends_in_reasoning,
    eos_ids,
    parse_reply,
)
from glm_gpu.chat.arguments import typed_argument
from glm_gpu.errors import CheckpointError, RequestError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "at": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, arguments)


# What models write, and what it means. GLM-4.5 puts each tag on a line, GLM-5 none.
CASES = {
    "plain": ("Hello, world.", Reply("", "Hello, world.", ())),
    "white space of plain text stays": ("  indented\n\n code \n", Reply("", "  indented\n\n code \n", ())),
    "reasoning": ("<think>\nTwo and two.\n</think>\n\nFour.\n", Reply("Two and two.", "Four.\n", ())),
    "empty reasoning": ("\n<think></think>\nFour.", Reply("", "Four.", ())),
    "reasoning without end": ("<think>I wonder", Reply("I wonder", "", ())),
    "call": (
        "<think>Ask.</think>Let me see.\n"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        Reply("Ask.", "Let me see.", (call("get_weather", city="Paris"),)),
    ),
    "call on several lines": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo </arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n",
        Reply("", "", (call("get_weather", city="São Paulo ", days=3),)),
    ),
    "call without arguments": ("<tool_call>now</tool_call>", Reply("", "", (call("now"),))),
    "call ends reasoning": (
        "<think>I need the time\n<tool_call>now</tool_call>",
        Reply("I need the time", "", (call("now"),)),
    ),
    "two calls": (
        "<tool_call>now</tool_call>\n<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>7</arg_value>"
        "</tool_call>",
        Reply("", "", (call("now"), call("get_weather", city="7"))),
    ),
    "text that only begins like tags": (
        "a < b, <thinking>, <tool_ca and </thin",
        Reply("", "a < b, <thinking>, <tool_ca and </thin", ()),
    ),
    "a value that holds tags": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x </tool_call> <think>y<arg_key></arg_value>"
        "</tool_call>done",
        Reply("", "done", (call("get_weather", city="x </tool_call> <think>y<arg_key>"),)),
    ),
    "object argument": (
        '<tool_call>get_weather<arg_key>at</arg_key><arg_value>{"lat": 1.5, "tags": ["a"]}</arg_value></tool_call>',
        Reply("", "", (call("get_weather", at={"lat": 1.5, "tags": ["a"]}),)),
    ),
    "call cut off": (
        "So:\n<tool_call>get_weather<arg_key>ci",
        Reply("", "So:<tool_call>get_weather<arg_key>ci", ()),
    ),
    "call without a name": ("<tool_call>{}</tool_call> ok", Reply("", "<tool_call>{}</tool_call> ok", ())),
    "value never closed": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</tool_call><tool_call>now</tool_call>",
        Reply("", "", (call("get_weather", city="Rome"), call("now"))),
    ),
}


def parse_in_pieces(pieces: list[str], tools=TOOLS, in_reasoning: bool = False) -> Reply:
    parser = ReplyParser(tools, in_reasoning)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return Reply.of(deltas + parser.finish())


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("text, expected", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
def test_reply_is_the_same_in_chunks_of_any_size(text, expected, size):
    assert parse_in_pieces(cut(text, size)) == expected


@given(
    fragments=st.lists(
        st.sampled_from([*REPLY_TAGS, "now", "city", " ", "\n", "x", "<", "</", "12", "<tool_", "é漢", "get_weather"]),
        max_size=25,
    ),
    seed=st.integers(0, 2**32),
    in_reasoning=st.booleans(),
)
@settings(max_examples=500)
def test_any_chunking_of_any_text_gives_the_same_reply(fragments, seed, in_reasoning):
    """C44."""
    text = "".join(fragments)
    whole = parse_in_pieces([text], in_reasoning=in_reasoning)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(len(text), 12))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse_in_pieces(pieces, in_reasoning=in_reasoning) == whole
    assert parse_in_pieces(list(text), in_reasoning=in_reasoning) == whole
    json.dumps([tool_call.arguments for tool_call in whole.tool_calls], allow_nan=False)


@given(st.text(alphabet="ab <>/thinkocl_\n", max_size=40))
def test_text_without_a_whole_tag_is_never_lost(text):
    if any(tag in text for tag in REPLY_TAGS):
        return
    assert parse_in_pieces(list(text)) == Reply("", text, ())


def test_a_call_is_given_once_and_only_when_it_is_whole():
    parser = ReplyParser(TOOLS)
    text = CASES["call on several lines"][0]
    seen = [(at, delta) for at, letter in enumerate(text) for delta in parser.push(letter)]
    assert [(at, delta.call.name) for at, delta in seen] == [(text.index("</tool_call>") + 11, "get_weather")]


def test_text_is_passed_on_as_soon_as_it_cannot_begin_a_tag():
    parser = ReplyParser()
    assert [delta.text for delta in parser.push("Hello <t")] == ["Hello"]
    assert [delta.text for delta in parser.push("he")] == [" <the"]


def test_reply_continues_the_reasoning_that_the_prompt_opened():
    assert ends_in_reasoning("<|assistant|>\n<think>")
    assert ends_in_reasoning("<|assistant|>\n<think>\n")
    assert not ends_in_reasoning("<|assistant|>\n<think></think>\n")
    assert parse_reply("\nhm</think>\nyes", in_reasoning=True) == Reply("hm", "yes", ())
    assert parse_reply("<think>hm</think>yes", in_reasoning=True) == Reply("hm", "yes", ())


def test_long_value_in_small_pieces_takes_linear_time():
    text = f"<tool_call>now<arg_key>a</arg_key><arg_value>{'<x ' * 100_000}</arg_value></tool_call>"
    parser = ReplyParser()
    scanned = 0
    for piece in cut(text, 3):
        parser.push(piece)
        scanned += len(parser._held)
    assert scanned < 12 * len(text) / 3


@pytest.mark.parametrize(
    "text, schema, expected",
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        (" 12\n", {"type": "integer"}, 12),
        ("12", {"type": "number"}, 12),
        ("1.5", {"type": "integer"}, "1.5"),
        ("twelve", {"type": "integer"}, "twelve"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"const": 7}, 7),
        ("12", None, 12),
        ("12 apples", None, "12 apples"),
        ('"quoted"', None, '"quoted"'),
        ("{}", {"description": "anything"}, {}),
        ("NaN", None, "NaN"),
        ("-Infinity", {"type": "number"}, "-Infinity"),
        ("1e999", {"type": "number"}, "1e999"),
        ("[" * 100_000, None, "[" * 100_000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("7", {"type": 5, "anyOf": [None, 3]}, 7),
    ],
)
def test_argument_takes_the_type_of_its_schema(text, schema, expected):
    value = typed_argument(text, schema)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("tools", [[None], [{}], [{"function": 3}], [{"function": {"name": ["x"], "parameters": {}}}]])
def test_odd_tool_definitions_do_not_break_a_reply(tools):
    text = "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert parse_reply(text, tools).tool_calls == (call("now", a=1),)


def pushed_through(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join([matcher.push(piece) for piece in pieces])
    return text + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    "stops, text, expected",
    [
        (["own fox"], "The quick brown fox jumps", ("The quick br", "own fox")),
        (["own fox"], "The brown dog", ("The brown dog", None)),
        (["own fox"], "The brown fo", ("The brown fo", None)),
        (["ab", "abc"], "xabc", ("x", "ab")),
        (["abc", "b"], "xabc", ("xa", "b")),
        (["abc", "bc"], "xabc", ("x", "abc")),
        (["aab"], "aaab", ("a", "aab")),
        (["漢字", "é"], "x漢é", ("x漢", "é")),
        (["\n\n"], "a\n\nb", ("a", "\n\n")),
        ([], "anything", ("anything", None)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_ends_before_the_stop_that_completes_first(stops, text, expected, size):
    assert pushed_through(stops, cut(text, size)) == expected


@given(
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4),
    st.text(alphabet="ab\n", max_size=30),
    st.integers(1, 5),
)
@settings(max_examples=500)
def test_stops_are_found_alike_in_any_pieces(stops, text, size):
    """C35."""
    shown, matched = pushed_through(stops, cut(text, size))
    assert (shown, matched) == pushed_through(stops, [text])
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown + (matched or "")) and (matched or shown == text)


def test_only_what_could_begin_a_stop_is_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.push("a text E") == "a text "
    assert matcher.push("N") == ""
    assert matcher.push("D") == ""
    assert matcher.matched == "END"
    assert matcher.push("more") == "" and matcher.finish() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(RequestError, match="stop"):
        StopMatcher(["x", ""])


class Vocabulary:
    """Just enough of a tokenizer: turn markers and their ids."""

    def token_id(self, token: str) -> int | None:
        return {"<|endoftext|>": 20, "<|user|>": 26, "<|observation|>": 28, "<|system|>": 25}.get(token)


class Config:
    eos_token_id = (20,)


def test_every_end_token_of_both_files_and_every_turn_marker_ends_a_chat():
    """C37."""
    assert eos_ids(Config, {"eos_token_id": [20, 26]}, Vocabulary()) == {20, 25, 26, 28}
    assert eos_ids(Config, {"eos_token_id": 27}, None) == {20, 27}


def test_raw_completion_ends_only_where_the_checkpoint_says():
    assert eos_ids(Config, {"eos_token_id": [20, 26]}, Vocabulary(), chat=False) == {20, 26}
    assert eos_ids(Config, {}, Vocabulary(), chat=False) == {20}


@pytest.mark.parametrize("value", ["<|user|>", [1, "x"], [True], -1, 1.5])
def test_end_tokens_that_are_no_ids_are_refused(value):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        eos_ids(Config, {"eos_token_id": value}, None)
