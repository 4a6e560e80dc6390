"""Constrained answers: always what the grammar allows; forced text as drafts; one line when it is malformed."""

import json
import re

import numpy as np
import pytest

from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.errors import RequestError
from glm_gpu.grammar import Constraint, Grammar, GrammarVocabulary
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams
from glm_gpu.tokenizer import Tokenizer

VOCAB_SIZE, END_IDS = 2048, frozenset([2029, 2035])
SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}, "is_king": {"type": "boolean"}},
                "required": ["name", "is_king"],
                "additionalProperties": False,
            },
            "kind": {"enum": ["psalm", "proverb", 7, None]},
        },
        "required": ["who", "kind"],
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 50},
        "minItems": 2,
        "maxItems": 4,
    },
    "number": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "maxProperties": 1},
    "unicode": {"enum": ["שלום", "δόξα", "naïve 🕊️"]},
    "choice": {"anyOf": [{"const": "yes"}, {"type": "null"}, {"type": "array", "items": {"const": 1}, "maxItems": 1}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(DEMO_MODEL)


@pytest.fixture(scope="module")
def vocabulary():
    return GrammarVocabulary(DEMO_MODEL / "tokenizer.json", VOCAB_SIZE, END_IDS)


@pytest.fixture(scope="module")
def engine():
    with Engine.open(None, EngineOptions(context=256, speculate="grammar")) as engine:
        yield engine


def allowed_ids(constraint: Constraint) -> list[int]:
    return np.flatnonzero(np.isfinite(constraint.mask(np.zeros(VOCAB_SIZE, np.float32)))).tolist()


def random_answer(constraint: Constraint, rng: np.random.Generator, limit: int = 400) -> list[int]:
    """Tokens drawn from those allowed, to the end of the grammar: what the worst of models would say."""
    ids: list[int] = []
    while not constraint.is_complete:
        assert len(ids) < limit
        token_id = int(rng.choice(allowed_ids(constraint)))
        if token_id in END_IDS:
            break
        ids.append(token_id)
        constraint.push(token_id)
    return ids


def conforms(value, schema) -> bool:
    """Whether a value satisfies the keywords that SCHEMAS uses; an independent reading of them."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kind = schema.get("type")
    if kind == "integer" and (isinstance(value, bool) or not isinstance(value, int)):
        return False
    if kind == "number" and (isinstance(value, bool) or not isinstance(value, int | float)):
        return False
    if kind in kinds and not isinstance(value, kinds[kind]):
        return False
    return all(
        [
            "enum" not in schema or any(value == e and type(value) is type(e) for e in schema["enum"]),
            "const" not in schema or value == schema["const"],
            "anyOf" not in schema or any(conforms(value, s) for s in schema["anyOf"]),
            "minimum" not in schema or schema["minimum"] <= value <= schema["maximum"],
            "maxLength" not in schema or len(value) <= schema["maxLength"],
            "pattern" not in schema or re.search(schema["pattern"], value) is not None,
            "required" not in schema or set(schema["required"]) <= set(value),
            schema.get("additionalProperties") is not False or set(value) <= set(schema["properties"]),
            "maxProperties" not in schema or len(value) <= schema["maxProperties"],
            "maxItems" not in schema or schema.get("minItems", 0) <= len(value) <= schema["maxItems"],
            all(
                conforms(value[k], s)
                for k, s in schema.get("properties", {}).items()
                if kind == "object" and k in value
            ),
            "items" not in schema or not isinstance(value, list) or all(conforms(v, schema["items"]) for v in value),
        ]
    )


def test_the_tests_own_reading_of_schemas_refuses_wrong_values():
    wrong = {"nested": {"who": {"name": "x"}, "kind": 7}, "array": [1], "number": {"x": "1"}, "unicode": "x"}
    wrong |= {"choice": [2], "pattern": "AB-12"}
    assert not any(conforms(value, SCHEMAS[name]) for name, value in wrong.items())


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_allowed_tokens_make_a_document_that_the_schema_accepts(vocabulary, tokenizer, name):
    grammar, rng = Grammar.from_json_schema(SCHEMAS[name]), np.random.default_rng(3)
    for _ in range(20):
        text = tokenizer.decode(random_answer(vocabulary.start(grammar), rng))
        assert conforms(json.loads(text), SCHEMAS[name]), text


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.from_regex("[a-c]{2,4}(-[0-9]+)?"), r"[a-c]{2,4}(-[0-9]+)?"),
        (Grammar.from_text('root ::= item ("," item)*\nitem ::= "ab" | "c" [0-9]'), r"(ab|c[0-9])(,(ab|c[0-9]))*"),
        (Grammar.from_text('start: "yes" | "no" " way"'), r"yes|no way"),
    ],
    ids=["regex", "gbnf", "lark"],
)
def test_other_grammars_are_followed_too(vocabulary, tokenizer, grammar, pattern):
    rng = np.random.default_rng(4)
    for _ in range(10):
        ids = random_answer(vocabulary.start(grammar), rng)
        assert re.fullmatch(pattern, tokenizer.decode(ids))


def test_forced_tokens_are_all_that_may_come_and_spell_as_the_tokenizer_does(vocabulary, tokenizer):
    constraint = vocabulary.start(Grammar.from_json_schema(SCHEMAS["nested"]))
    forced = constraint.forced(100)
    assert tokenizer.decode(forced) == '{"who": {"name": "'
    assert forced == tokenizer.encode('{"who": {"name": "')
    assert constraint.num_valid([*forced, forced[0]]) >= len(forced)
    for token_id in forced:
        assert allowed_ids(constraint) == [token_id]
        constraint.push(token_id)
    assert len(allowed_ids(constraint)) > 1000
    assert constraint.forced(100) == []


def test_end_tokens_are_allowed_where_the_grammar_may_stop_and_nothing_else_at_its_end(vocabulary, tokenizer):
    constraint = vocabulary.start(Grammar.from_regex("ab+"))
    assert not END_IDS & set(allowed_ids(constraint))
    for token_id in tokenizer.encode("ab"):
        constraint.push(token_id)
    assert set(allowed_ids(constraint)) > END_IDS and not constraint.is_complete
    constraint = vocabulary.start(Grammar.from_regex("ab"))
    for token_id in tokenizer.encode("ab"):
        constraint.push(token_id)
    assert constraint.is_complete


def test_logits_of_allowed_tokens_and_the_argument_stay_as_they_are(vocabulary):
    constraint = vocabulary.start(Grammar.from_regex("[a-z]+"))
    logits = np.random.default_rng(0).normal(size=VOCAB_SIZE).astype(np.float32)
    before, masked = logits.copy(), constraint.mask(logits)
    assert np.array_equal(logits, before)
    kept = np.isfinite(masked)
    assert 26 <= kept.sum() < VOCAB_SIZE and np.array_equal(masked[kept], logits[kept])


def test_ids_beyond_the_tokenizer_s_never_come():
    vocabulary = GrammarVocabulary(DEMO_MODEL / "tokenizer.json", VOCAB_SIZE + 37, END_IDS)
    masked = vocabulary.start(Grammar.from_regex("(?s).*")).mask(np.zeros(VOCAB_SIZE + 37, np.float32))
    assert masked.shape == (VOCAB_SIZE + 37,) and not np.isfinite(masked[VOCAB_SIZE:]).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.from_json_schema('{"type": '), "the JSON schema is not valid JSON"),
        (lambda: Grammar.from_json_schema("[1]"), "is a JSON list, expected an object"),
        (lambda: Grammar.from_json_schema({"type": "strin"}), "Invalid type: strin"),
        (lambda: Grammar.from_json_schema({"type": "string", "not": {"const": "a"}}), "not"),
        (lambda: Grammar.from_json_schema({"enum": []}), "Unsatisfiable"),
        (lambda: Grammar.from_json_schema('{"maximum": NaN}'), "not valid JSON"),
        (lambda: Grammar.from_regex("(a"), "unclosed group"),
        (lambda: Grammar.from_text("root ::= other"), "other"),
        (lambda: Grammar.from_text("start: other"), "other"),
        (lambda: Grammar.from_text("hello"), "the grammar cannot be used"),
        (lambda: Grammar.from_text(""), "the grammar cannot be used"),
    ],
)
def test_what_is_malformed_is_refused_in_one_line(make, message):
    with pytest.raises(RequestError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_files_are_read_by_what_they_are_and_named_in_messages(tmp_path):
    (tmp_path / "code.regex").write_text("[0-9]{3}\n")
    assert Grammar.open(tmp_path / "code.regex").definition == Grammar.from_regex("[0-9]{3}").definition
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RequestError, match=r"bad\.json is not valid JSON"):
        Grammar.open(tmp_path / "bad.json", is_json_schema=True)
    (tmp_path / "latin.gbnf").write_bytes(b"root ::= \xff")
    for name in ("latin.gbnf", "none.gbnf"):
        with pytest.raises(RequestError, match=f"{name} cannot be read"):
            Grammar.open(tmp_path / name)


def test_an_answer_of_the_demo_conforms_and_forced_tokens_save_passes(engine):
    constraint = engine.constraint(Grammar.from_json_schema(SCHEMAS["nested"]))
    session = engine.session()
    ids = list(
        session.generate(engine.tokenizer.encode("The man"), SamplingParams(temperature=0), 120, True, constraint)
    )
    assert conforms(json.loads(engine.tokenizer.decode(ids)), SCHEMAS["nested"])
    assert session.last.finish_reason == "stop"
    assert session.last.accepted_tokens == session.last.drafted_tokens > 0
    assert session.last.tokens_per_pass >= 1.2


def test_a_schema_of_thousands_of_texts_is_within_the_bounds(vocabulary):
    fields = {f"p{i}": {"enum": [f"text {i} {j}" for j in range(250)]} for i in range(20)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    constraint = vocabulary.start(Grammar.from_json_schema(schema))
    assert np.isfinite(constraint.mask(np.zeros(vocabulary.vocab_size, np.float32))).any()
