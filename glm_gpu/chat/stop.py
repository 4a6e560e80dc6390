"""What ends a reply: end tokens, and stop strings found in text that arrives in pieces."""

from collections.abc import Iterable, Mapping
from typing import Any

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.tokenizer import Tokenizer

# Tokens that begin someone else's turn or end the text: after them nothing of this reply can come.
_TURN_MARKERS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|observation|>")


def eos_ids(
    config: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None, chat: bool = True
) -> frozenset[int]:
    """Every token id that ends a reply: those of config.json and of generation_config.json, which may differ.

    Args:
        generation_config: the object in generation_config.json, or {}.
        tokenizer: looks up the chat's turn markers; None when only raw ids are used.
        chat: the prompt is a rendered conversation, in which a marker of another turn ends the reply too. A raw
            completion ends only where the checkpoint says so.

    Raises:
        CheckpointError: generation_config.json holds something else than ids.
    """
    given = generation_config.get("eos_token_id")
    given = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token_id) is int and token_id >= 0 for token_id in given):
        raise CheckpointError(
            f"generation_config.json: eos_token_id is {given!r:.100}, expected token ids; fetch it again"
        )
    found = {*config.eos_token_id, *given}
    if chat and tokenizer is not None:
        found |= {token_id for name in _TURN_MARKERS if (token_id := tokenizer.token_id(name)) is not None}
    return frozenset(found)


class StopMatcher:
    """Lets text through up to the first stop string; only an end that may begin a stop string is held back.

    Of several matches the one that ends first counts, so the result is the same however the text is cut into pieces.
    Of two that end together it is the longer: nothing of either is let through.

    Args:
        stops: stop strings; one may be the beginning of another.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise RequestError("stop: an empty string would end every reply at once; leave it out")
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to stand before any stop string; "" once one has matched."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        num_held = longest_beginning_at_end(text, self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


def longest_beginning_at_end(text: str, words: Iterable[str]) -> int:
    """How many characters at the end of the text begin one of the words without completing it."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
