"""Text to token ids and back: `tokenizer.json` through the tokenizers library, and text out one token at a time."""

import codecs
import json
import re
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from glm_gpu.errors import CheckpointError, UnsupportedModelError

# A Unicode noncharacter, never meant for interchange: it marks where `guard` cut a control token.
_CUT = "\ufdd0"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A checkpoint's vocabulary: `encode`, `decode`, and `stream` for text that arrives token by token.

    Control tokens are the added tokens that are more than white space (`<|user|>`, `<think>`, `<tool_call>`, …);
    runs of spaces, which some vocabularies also add, are ordinary text.
    """

    def __init__(self, backend: Any, decoder: dict[str, Any] | None) -> None:
        self._backend = backend
        self._read_token = _token_reader(decoder)
        self._strips_first_space = _strips_first_space(decoder)
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self._control_ids = {i: token.content for i, token in added.items() if token.content.strip()}
        self._hidden_ids = {i for i, token in added.items() if token.special}

    @classmethod
    def open(cls, model_dir: Path) -> "Tokenizer":
        """The tokenizer of a model folder.

        Raises:
            CheckpointError: tokenizer.json is missing or damaged.
            UnsupportedModelError: its tokens do not map to bytes one by one.
        """
        from tokenizers import Tokenizer as Backend

        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; copy tokenizer.json from the model's source repository beside config.json "
                "(until then only raw token ids can be used)"
            )
        try:
            backend = Backend.from_buffer(path.read_bytes())  # not its path, which need not be UTF-8
        except Exception as error:  # the library raises the bare class
            raise CheckpointError(f"{path} is damaged ({error!s:.200}); fetch this file again") from error
        decoder = backend.decoder
        return cls(backend, None if decoder is None else json.loads(decoder.__getstate__()))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text; nothing is put before or after it.

        Args:
            text: half characters (lone surrogates, as JSON may carry them) become U+FFFD.
            special: True reads control tokens in the text as such, except where `guard` cut them: this is for
                rendered prompts, in which `ChatTemplate.render` has guarded everything that came from outside.
                False reads all of it as plain text: no input can inject a control token.
        """
        text = _whole_characters(text)
        if not special:
            text = self.guard(text)
        ids: list[int] = []
        for piece in text.split(_CUT):
            if piece:
                ids += self._backend.encode(piece, add_special_tokens=False).ids
        return ids

    def guard(self, text: str, keep: Collection[str] = ()) -> str:
        """The text with every control token in it cut, so that `encode` takes it as plain text.

        Text without control tokens comes back as it is and so gets the ids that it always gets. A noncharacter
        U+FDD0 in the text is lost.

        Args:
            keep: control tokens to leave whole.
        """
        text = text.replace(_CUT, "")
        if self._control_pattern is None:
            return text
        parts, done, at = [], 0, 0
        while match := self._control_pattern.search(text, at):
            at = match.start() + 1  # not match.end(): the rest of a token may begin another one
            if match.group() not in keep:
                parts.append(text[done:at])
                done = at
        return _CUT.join([*parts, text[done:]])

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        # Longest first, as the library matches; a token of one character cannot be cut.
        names = sorted((name for name in self._control_ids.values() if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, whole characters or not, that a token stands for; b"" for ids beyond the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                found = b""
            elif token_id in self._control_ids:
                found = token.encode()
            else:
                found = self._read_token(token)
            self._bytes[token_id] = found
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the vocabulary marks this token as special, so that output does not show it unless asked to."""
        return token_id in self._hidden_ids

    def decode(self, token_ids: Iterable[int], special: bool = False, keep: Collection[str] = ()) -> str:
        """The text of these ids: what `stream` gives for them, put together."""
        stream = self.stream(special, keep)
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()

    def stream(self, special: bool = False, keep: Collection[str] = ()) -> "TextStream":
        """A reader of ids as they are generated.

        Args:
            special: show special tokens too.
            keep: special tokens to show even so, spelled as in the vocabulary.
        """
        shown = {token_id for name in keep if (token_id := self.token_id(name)) is not None}
        return TextStream(self, set() if special else self._hidden_ids - shown, self._strips_first_space)


class TextStream:
    """Text of ids that come one by one; a character split over tokens is held until it is whole.

    The pieces put together are the UTF-8 reading of all tokens' bytes, each ill-formed part as one U+FFFD. The cost
    of a token does not depend on how many came before.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int], strips_first_space: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._strips_space = strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text this token completes; "" when it is hidden or ends inside a character."""
        if token_id in self._hidden_ids:
            return ""
        return self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is still held: "" or, for an unfinished character, U+FFFD once."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def _whole_characters(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _token_reader(decoder: dict[str, Any] | None):
    """The function from a token's spelling to its bytes, for the decoders whose tokens have bytes of their own."""
    kinds = {step["type"] for step in _steps(decoder)}
    if kinds == {"ByteLevel"}:
        return _read_byte_level
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _read_byte_fallback
    found = ", ".join(sorted(kinds)) or "none"
    raise UnsupportedModelError(
        f"tokenizer.json has the decoder {found}; only ByteLevel and ByteFallback (with Replace, Fuse, Strip) are read"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _strips_first_space(decoder: dict[str, Any] | None) -> bool:
    return any(step["type"] == "Strip" and step["start"] > 0 for step in _steps(decoder))


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()  # a token outside the byte alphabet stands for itself


def _read_byte_fallback(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match.group(1), 16)])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself when printable, else the next free one.

    Source: GPT-2, `bytes_to_unicode` in its encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
