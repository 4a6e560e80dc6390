"""Counts of measured values by size."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values fell at or below each bound, with their number and sum; as Prometheus counts them.

    Written by one thread, read by any: a reader may see a value in one count and not yet in another.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def record(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The bound that `share` of all values do not exceed, infinite beyond the last; None before any value."""
        total, seen = self.total, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= share * total:
                return bound
        return None
