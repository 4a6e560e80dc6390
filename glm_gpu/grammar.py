"""Output that must conform: JSON schemas, regular expressions, GBNF and Lark grammars, through llguidance."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm_gpu.errors import RequestError

# Where a schema leaves space open, it is written as json.dumps writes it. Space left to the model costs tokens, forces
# none, and lets a small model run on in blanks.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
REGEX_SUFFIX = ".regex"
# A state takes 1 to 2 kB for as long as the answer lasts; the library's own bound, 250,000, is half a gigabyte.
_MAX_STATES = 25_000
# For the states before the first token: 40 MB at most; the library's own bound, a million, is 250 MB. Schemas with
# 5,000 texts to choose from stay below it.
_FUEL = 150_000
# The library repeats the grammar in what it says, some of it twice.
_MAX_MESSAGE_CHARS = 500


class Grammar:
    """A constraint on a whole answer, checked when it is made; no model or tokenizer is needed for that."""

    def __init__(self, definition: str, what: str) -> None:
        from llguidance import LLMatcher

        problem = LLMatcher.validate_grammar(definition)
        if problem:
            raise RequestError(f"{what} cannot be used: {_one_line(problem)}")
        self.definition = definition

    @classmethod
    def from_json_schema(cls, schema: str | dict[str, Any] | bool, what: str = "the JSON schema") -> "Grammar":
        """An answer that is one JSON document which the schema accepts.

        Args:
            schema: JSON text, or what it parses to.
            what: what messages call it.

        Raises:
            RequestError: it is no schema, or uses a keyword that cannot be enforced.
        """
        from llguidance import LLMatcher

        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{what} is not valid JSON: {_one_line(error)}") from None
        if not isinstance(parsed, dict | bool):
            raise RequestError(f"{what} is a JSON {type(parsed).__name__}, expected an object such as {{}}")
        try:
            definition = LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE)
        except ValueError as error:  # half characters, which Python's JSON has and the library's has not
            raise RequestError(f"{what} cannot be used: {_one_line(error)}") from None
        return cls(definition, what)

    @classmethod
    def from_regex(cls, pattern: str, what: str = "the regular expression") -> "Grammar":
        """An answer that a regular expression matches as a whole.

        Raises:
            RequestError: it is malformed.
        """
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(pattern), what)

    @classmethod
    def from_text(cls, text: str, what: str = "the grammar") -> "Grammar":
        """An answer that a GBNF grammar derives from `root`, or a Lark grammar from `start`.

        Raises:
            RequestError: it is malformed.
        """
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            lark = any_to_lark(text)
        except Exception as error:  # the converter raises the bare class
            raise RequestError(f"{what} cannot be used: {_one_line(error)}") from None
        return cls(LLMatcher.grammar_from_lark(lark), what)

    @classmethod
    def open(cls, path: Path, is_json_schema: bool = False) -> "Grammar":
        """The grammar in a file: a JSON schema if so said, a regular expression by its suffix, else GBNF or Lark.

        Raises:
            RequestError: the file cannot be read, or what it holds is malformed.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read: {_one_line(error)}") from None
        if is_json_schema:
            return cls.from_json_schema(text, str(path))
        if path.suffix == REGEX_SUFFIX:
            return cls.from_regex(text.removesuffix("\n"), str(path))
        return cls.from_text(text, str(path))


class GrammarVocabulary:
    """A model's tokens as grammars see them; takes a second for 150,000 of them, so it is made once.

    Args:
        tokenizer_path: the model's tokenizer.json.
        vocab_size: logits of the model; ids beyond the tokenizer's never come.
        end_ids: tokens that end an answer, allowed where the grammar is satisfied.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, end_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        text = tokenizer_path.read_text(encoding="utf-8")
        self.vocab_size, self.end_ids = vocab_size, end_ids
        self.backend = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(end_ids) or None)

    def start(self, grammar: Grammar) -> "Constraint":
        """The grammar at the beginning of an answer.

        Raises:
            RequestError: it cannot be used with this vocabulary.
        """
        return Constraint(self, grammar)


class Constraint:
    """One answer's way through a grammar, token by token. `end_ids` may end it where the grammar is satisfied."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.end_ids = vocabulary.end_ids
        self._vocab_size = vocabulary.vocab_size
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_STATES, initial_lexer_fuel=_FUEL)
        self._matcher = LLMatcher(vocabulary.backend, grammar.definition, log_level=0, limits=limits)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """The logits with -inf for every token that cannot come next.

        Args:
            logits: [V] f32; left unchanged.

        Raises:
            RequestError: the grammar grew too complex to be followed.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(bool)
        return np.where(allowed, logits, np.float32(-np.inf))

    def push(self, token_id: int) -> None:
        """Go on behind a token that `mask` allowed."""
        self._matcher.consume_token(token_id)
        self._check()

    def forced(self, limit: int) -> list[int]:
        """The next tokens as far as there is only one choice, at most `limit`."""
        return self._matcher.compute_ff_tokens()[:limit]

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens could come next, one after the other."""
        return self._matcher.validate_tokens(list(token_ids))

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {_one_line(self._matcher.get_error())}")


def _one_line(problem: object) -> str:
    return " ".join(str(problem)[:_MAX_MESSAGE_CHARS].split())
