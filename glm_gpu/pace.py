"""How much of waiting prompts joins a step of running answers, from what steps have cost so far."""

# A step that also works on a prompt may last so many times one that does not. Tokens then come at most at five times
# their usual gap, with room for a busy machine.
_MAX_STRETCH = 3.0
# Twice the rows cost less than twice the time: so they are tried where half as much again would do.
_TRY_STRETCH = 2.0
_MIN_ROWS = 8
# Where few rows are too many already, more are taken while twice as many last only so much longer: with experts on disk
# a few rows read most of them, and small parts would add up to a far longer wait for everyone.
_FLAT = 1.15
# After so many steps a larger size is tried anew, so that one bad moment is not believed for ever.
_MAX_AGE = 100
_NEW_SHARE = 0.3


class Pace:
    """Learns how long steps of each size last, sizes by powers of two; what it proposes changes no result.

    Args:
        max_rows: most rows of prompts in one pass.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._sizes = [min(_MIN_ROWS, max_rows)]
        while self._sizes[-1] < max_rows:
            self._sizes.append(min(2 * self._sizes[-1], max_rows))
        self._decode_s: float | None = None
        self._seconds: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
        self._num_steps = self._last_rows = 0

    def rows(self, num_decoding: int) -> int:
        """How many rows of prompts the next pass should take beside the rows of `num_decoding` answers."""
        if not num_decoding:
            return self.max_rows
        size = self._sizes[0]
        if self._decode_s is None:
            return size
        limit_s = _MAX_STRETCH * self._decode_s
        for larger in self._sizes[1:]:
            here, there = self._seconds.get(size), self._seconds.get(larger)
            if here is None or size > self._last_rows:
                break
            if there is None:
                is_better = here <= _TRY_STRETCH * self._decode_s or here > limit_s
            else:
                is_better = there <= max(limit_s, _FLAT * here)
            if not is_better:
                break
            size = larger
        return size

    def record(self, seconds: float, num_decoding: int, num_prefill: int) -> None:
        """Learn from a pass."""
        if not num_decoding:
            return
        if not num_prefill:
            self._decode_s = _mixed(self._decode_s, seconds)
            return
        self._last_rows = num_prefill
        self._num_steps += 1
        if num_prefill in self._sizes:
            self._seconds[num_prefill] = _mixed(self._seconds.get(num_prefill), seconds)
            self._seen_at[num_prefill] = self._num_steps
        for size, step in list(self._seen_at.items()):
            if size > num_prefill and self._num_steps - step > _MAX_AGE:
                del self._seconds[size], self._seen_at[size]


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else (1 - _NEW_SHARE) * known + _NEW_SHARE * new
