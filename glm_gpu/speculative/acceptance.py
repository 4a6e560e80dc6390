"""How often guesses come true, by where they come from and how far ahead they are."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

# Guesses verified behind one token at most: beyond, even text that repeats gains little, and prefetching stops.
MAX_WIDTH = 8

# Old guesses count less: a window of about thirty.
_DECAY = 0.97
# Before there are guesses: what to expect of the first, and how many guesses that is worth.
_PRIOR, _PRIOR_TRIALS = 0.5, 2.0


@dataclass
class DepthCounts:
    """Guesses at one depth: how many were put to the test, and came true; all, and lately."""

    tried: int = 0
    right: int = 0
    recent_tried: float = 0.0
    recent_right: float = 0.0

    def count(self, is_right: bool) -> None:
        self.tried += 1
        self.right += is_right
        self.recent_tried = self.recent_tried * _DECAY + 1
        self.recent_right = self.recent_right * _DECAY + is_right


@dataclass
class Acceptance:
    """How often guesses came true, by source and depth; a guess is tried only when those before it came true."""

    counts: dict[str, list[DepthCounts]] = field(default_factory=dict)
    _chances: dict[str, list[float]] = field(default_factory=dict, repr=False)

    def observe(self, source: str, token_ids: Sequence[int], truth: Sequence[int]) -> None:
        """Compare a draft, verified or not, with what came."""
        if not token_ids:
            return
        depths = self.counts.get(source)
        if depths is None:
            depths = self.counts[source] = [DepthCounts() for _ in range(MAX_WIDTH)]
        self._chances.pop(source, None)
        for depth, guessed, came in zip(depths, token_ids, truth, strict=False):
            depth.count(guessed == came)
            if guessed != came:
                return

    def rates(self, source: str) -> list[float]:
        """The chance of each depth's guess once those before it are right; of untried depths, that of the depth before.

        Returns:
            MAX_WIDTH of them.
        """
        rates, prior = [], _PRIOR
        for depth in self.counts.get(source, [DepthCounts()] * MAX_WIDTH):
            prior = (depth.recent_right + prior * _PRIOR_TRIALS) / (depth.recent_tried + _PRIOR_TRIALS)
            rates.append(prior)
        return rates

    def chances(self, source: str) -> list[float]:
        """The chance that this guess and all before it come true, by depth: MAX_WIDTH of them, falling."""
        chances = self._chances.get(source)
        if chances is None:
            chances = self._chances[source] = list(itertools.accumulate(self.rates(source), operator.mul))
        return chances
