"""What a drafter is: something that guesses the next tokens more cheaply than the model computes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Draft:
    """Tokens guessed to come next, best first; `source` names what their acceptance is counted under."""

    source: str
    token_ids: list[int]


class Drafter(Protocol):
    """Guesses from what the trunk has computed so far; right or wrong, never part of an answer unverified."""

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        """Tokens that the trunk's cache now holds for good.

        Args:
            token_ids: T of them, which continue those observed before.
            hidden: [T, D] f32, the trunk's `Output.hidden` for them.
        """

    def cut(self, length: int) -> int:
        """Forget all but the first tokens.

        Returns:
            How many of them it could keep, at most `length`: the trunk must run the others again.
        """

    def draft(self, ids: Sequence[int], width: int) -> Draft:
        """Guess at most `width` tokens, or none.

        Args:
            ids: all tokens so far; the last one is chosen but not yet observed.
        """
