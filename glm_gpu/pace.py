"""How much of waiting prompts joins a step of running answers, from what steps have lasted so far."""

from bisect import bisect_right
from collections import deque

# A step that also works on prompts may last so many times one that does not: tokens then come at no more than five
# times their usual gap, with room for what a busy machine adds and no step has shown yet.
_MAX_STRETCH = 2.6
# Where one row is too much already, more are taken as far as all together last only so much longer: with experts on
# disk a few rows may read most of them, and small parts would add up to a far longer wait for everyone.
_FLAT = 1.25
# What was measured so many steps ago is measured again, so that one bad moment is not believed for ever. A step without
# a prompt is due far oftener, for all is held against those; it costs a fiftieth of the time.
_MAX_AGE, _ALONE_AGE = 100, 24
# Steps of a size that are remembered. A size is judged by the longest but one of them, its 94th percentile, against the
# shortest but one of the last steps without a prompt: what a machine does for others is no reason for longer steps.
_NUM_SAMPLES, _NUM_ALONE = 16, 8
# Steps without a prompt before the first with one; and where one row is too much, tries of a size.
_MIN_SAMPLES = 3
# A row costs more behind a longer context; what was measured is believed up to twice the context, and a bit more where
# contexts are short.
_CONTEXT_GROWTH, _SHORT_CONTEXT = 2, 512


class Pace:
    """Learns how long steps of each size last; what it proposes changes no result.

    Steps are told apart by the number of answers in them, by powers of two, and by the rows of prompts, by sizes that
    grow by a third to a half. The first step beside an answer takes one row; a size follows on the measured one below
    it as soon as it would do at the same price a row.

    Args:
        max_rows: most rows of prompts in one pass.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._sizes = _sizes(max_rows)
        self._kinds: dict[int, _Kind] = {}

    def rows(self, num_answers: int, context: int = 0) -> int:
        """How many rows of prompts the next pass should take; 0 where one without any is to be measured first.

        Args:
            num_answers: running answers that get a token in the pass.
            context: positions before the first of the rows.
        """
        if not num_answers:
            return self.max_rows
        kind = self._kinds.get(num_answers.bit_length())
        alone = kind and kind.known(0, context=0)
        if not alone or alone.num < _MIN_SAMPLES or kind.age(alone) > _ALONE_AGE:
            return 0
        limit_s, smallest = _MAX_STRETCH * alone.low_s, kind.known(self._sizes[0], context)
        if smallest is None:
            return self._sizes[0]
        if smallest.low_s > limit_s:
            return self._flat(kind, smallest, context)
        size, here = self._sizes[0], smallest
        for larger in self._sizes[1:]:
            there = kind.known(larger, context)
            if there is None or kind.age(there) > _MAX_AGE:
                # No row costs more than those before it: most of what it reads, they read already.
                is_fit = alone.low_s + larger / size * (here.high_s - alone.low_s) <= limit_s
            else:
                is_fit = there.high_s <= limit_s
            if not is_fit:
                break
            size, here = larger, there
            if here is None:
                break
        return size

    def _flat(self, kind: "_Kind", smallest: "_Steps", context: int) -> int:
        """The most rows that last about as long as the smallest part, of which too few steps may be known yet."""
        size, here = self._sizes[0], smallest
        if kind.age(here) > _ALONE_AGE or here.num < _MIN_SAMPLES:
            return size
        limit_s, slope_s = _FLAT * smallest.median_s, 0.0
        for larger in self._sizes[1:]:
            there, guess_s = kind.known(larger, context), here.median_s + (larger - size) * slope_s
            if there is None or there.num < _MIN_SAMPLES:
                return larger if guess_s <= limit_s else size
            if (guess_s if kind.age(there) > _MAX_AGE else there.median_s) > limit_s:
                break
            size, here = larger, there
            slope_s = (here.median_s - smallest.median_s) / (size - self._sizes[0])
        return size

    def record(self, seconds: float, num_answers: int, num_rows: int, context: int = 0) -> None:
        """Learn from a pass; the arguments are those of `rows`, and what it took of prompts."""
        if num_answers:
            kind = self._kinds.setdefault(num_answers.bit_length(), _Kind())
            size = self._sizes[bisect_right(self._sizes, num_rows) - 1] if num_rows else 0
            kind.record(size, seconds, context)


class _Steps:
    """The last steps of one size."""

    def __init__(self, max_samples: int) -> None:
        self._seconds: deque[float] = deque(maxlen=max_samples)
        self.num = 0
        self.low_s = self.median_s = self.high_s = 0.0
        self.context = self.seen_at = 0

    def record(self, seconds: float, context: int, step: int) -> None:
        self._seconds.append(seconds)
        ranked, self.num = sorted(self._seconds), len(self._seconds)
        at = min(1, self.num - 1), (self.num - 1) // 2, max(0, self.num - 2)
        self.low_s, self.median_s, self.high_s = (ranked[i] for i in at)
        self.context, self.seen_at = context, step


class _Kind:
    """Steps with about the same number of answers, by rows of prompts."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._by_size: dict[int, _Steps] = {}

    def known(self, size: int, context: int) -> _Steps | None:
        """The steps of a size; None if there were none, or only behind far shorter contexts."""
        steps = self._by_size.get(size)
        if steps is None or context > _CONTEXT_GROWTH * steps.context + _SHORT_CONTEXT:
            return None
        return steps

    def age(self, steps: _Steps) -> int:
        """Steps since the last of that size."""
        return self._num_steps - steps.seen_at

    def record(self, size: int, seconds: float, context: int) -> None:
        self._num_steps += 1
        known = self.known(size, context)
        if known is None or self.age(known) > _MAX_AGE:
            known = self._by_size[size] = _Steps(_NUM_SAMPLES if size else _NUM_ALONE)
        known.record(seconds, context, self._num_steps)


def _sizes(max_rows: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the most."""
    powers = [1 << n for n in range(max_rows.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2) if size < max_rows}
    return sorted({*sizes, max_rows})
