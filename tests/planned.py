"""A drafter that knows the answer: right or wrong at places a test chooses."""

from collections.abc import Callable, Sequence

import numpy as np

from glm_gpu.speculative import Draft


class PlannedDrafter:
    """Drafts the known text, with a wrong token wherever `is_right` says so.

    Args:
        known_ids: prompt and answer as plain decoding gives them.
        is_right: takes the position in the text.
        vocab_size: wrong tokens are the right ones' successors within it.
    """

    num_pending, is_ready = 0, True

    def __init__(self, known_ids: Sequence[int], is_right: Callable[[int], bool], vocab_size: int) -> None:
        self.known_ids, self.is_right, self.vocab_size = list(known_ids), is_right, vocab_size
        self.observed_ids: list[int] = []

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        assert len(token_ids) == len(hidden)
        self.observed_ids += token_ids

    def cut(self, length: int) -> int:
        del self.observed_ids[length:]
        return length

    def draft(self, ids: Sequence[int], width: int) -> Draft:
        assert list(ids[:-1]) == self.observed_ids, "drafts must be wanted behind what was observed"
        token_ids = []
        for place in range(len(ids), len(ids) + width):
            known = self.known_ids[place] if place < len(self.known_ids) else 0
            token_ids.append(known if self.is_right(place) else (known + 1) % self.vocab_size)
        return Draft("mtp", token_ids)
