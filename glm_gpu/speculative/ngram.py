"""Drafts from repetition: what followed the longest recent match of the text's end."""

from collections.abc import Sequence

import numpy as np

from glm_gpu.speculative.draft import Draft

# A match of one token says little; of two it already has a place in the text.
MIN_MATCH = 2
# Longer matches predict no better.
MAX_MATCH = 32
# Most recent places looked at for each pair of tokens: bounds the cost of a draft on any text.
MAX_PLACES = 8
# Matches up to these lengths are counted apart: a long match is right far more often than a short one.
GRADES = (2, 4, 8, MAX_MATCH)


class NgramDrafter:
    """Copies what followed when the text's last tokens stood in it before; the longest match wins, then the latest.

    Works over prompt and answer alike, on any model. Holds an index of pairs of tokens; a draft costs some tens of
    microseconds, whatever the length of the text.

    Source: prompt lookup decoding (Saxena 2023); LLMA (arXiv 2304.04487).
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}
        self._indexed = 1

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        """Nothing: the index grows with the ids that `draft` is given."""

    def cut(self, length: int) -> int:
        """Index again from there on. Old entries may stay: a place is believed only after comparing the text."""
        self._indexed = max(1, min(self._indexed, length))
        return length

    def draft(self, ids: Sequence[int], width: int) -> Draft:
        """What followed the longest match, copied in a loop where it runs into the text's end."""
        self._index(ids)
        best, best_start = 0, 0
        for start in reversed(self._places.get(tuple(ids[-MIN_MATCH:]), ())):
            length = match_length(ids, start)
            if length > best:
                best, best_start = length, start
        if best < MIN_MATCH:
            return Draft("ngram", [])
        token_ids: list[int] = []
        for place in range(best_start, best_start + width):
            token_ids.append(ids[place] if place < len(ids) else token_ids[place - len(ids)])
        return Draft(f"ngram {next(grade for grade in GRADES if best <= grade)}", token_ids)

    def _index(self, ids: Sequence[int]) -> None:
        """Enter each pair under the place behind it; the text's last pair has nothing behind it yet."""
        for place in range(self._indexed + 1, len(ids)):
            places = self._places.setdefault((ids[place - 2], ids[place - 1]), [])
            if not places or places[-1] != place:
                places.append(place)
                del places[:-MAX_PLACES]
        self._indexed = max(self._indexed, len(ids) - 1)


def match_length(ids: Sequence[int], start: int) -> int:
    """How many tokens before `start` equal the text's last ones, at most MAX_MATCH."""
    if start >= len(ids):
        return 0
    length = 0
    while length < min(MAX_MATCH, start) and ids[start - 1 - length] == ids[-1 - length]:
        length += 1
    return length
