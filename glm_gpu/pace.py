"""How much of waiting prompts joins a step of running answers, from what steps have cost so far."""

# A step that also works on a prompt may last so many times one that does not. Tokens then come at most at five times
# their usual gap, with room for what the estimate misses.
_MAX_STRETCH = 3.0
_MIN_ROWS = 16
# Each observation counts this much less than the next: about the last 30 steps decide.
_DECAY = 0.97


class Pace:
    """Fits seconds = decode step + fixed + rows * slope to the steps seen; the sizes it proposes change no result.

    Args:
        max_rows: most rows of prompts in one pass.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._decode_s: float | None = None
        self._sums = [0.0] * 5  # of weights, x, y, x * x, x * y, where x are rows and y seconds beyond a decode step

    def rows(self, num_decoding: int) -> int:
        """How many rows of prompts the next pass should take beside the rows of `num_decoding` answers."""
        if not num_decoding:
            return self.max_rows
        if self._decode_s is None or not self._sums[0]:
            return min(_MIN_ROWS, self.max_rows)
        fixed_s, slope_s = self._fit()
        spare_s = (_MAX_STRETCH - 1) * self._decode_s - fixed_s
        # Where the fixed part alone is too much (experts come from disk, and a few rows need most of them), small
        # parts would stall everyone for longer in all.
        if spare_s <= 0 or slope_s <= 0:
            return self.max_rows
        return max(min(_MIN_ROWS, self.max_rows), min(self.max_rows, int(spare_s / slope_s)))

    def record(self, seconds: float, num_decoding: int, num_prefill: int) -> None:
        """Learn from a pass."""
        if not num_prefill:
            self._decode_s = seconds if self._decode_s is None else 0.8 * self._decode_s + 0.2 * seconds
            return
        extra = seconds - (self._decode_s or 0.0) if num_decoding else seconds
        x, y = float(num_prefill), max(extra, 0.0)
        self._sums = [_DECAY * s + v for s, v in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)]

    def _fit(self) -> tuple[float, float]:
        """(fixed, slope) in seconds, neither below 0."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if spread > 1e-9 * n * xx:
            slope = (n * xy - x * y) / spread
            fixed = (y - slope * x) / n
            if slope > 0 and fixed > 0:
                return fixed, slope
            if slope <= 0:
                return y / n, 0.0
        return 0.0, y / x
