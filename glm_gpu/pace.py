"""How much of waiting prompts joins a step of running answers, from what steps have lasted so far."""

from bisect import bisect_right
from collections import deque

# A step that also works on prompts may last so many times one that does not: tokens then come at no more than five
# times their usual gap, with room for what a busy machine adds and no step has shown yet.
_MAX_STRETCH = 3.0
# Where the smallest part is too much already, more is taken while the next size lasts only so much longer: with experts
# on disk a few rows read most of them, and small parts would add up to a far longer wait for everyone.
_FLAT = 1.15
# What was measured so many steps ago is measured again, so that one bad moment is not believed for ever.
_MAX_AGE = 100
# Steps of a size that are remembered. A size is judged by the longest but one of them, its 94th percentile, against the
# 25th of steps without a prompt.
_NUM_SAMPLES = 16
# Steps without a prompt before the first with one; and where the limit is passed anyway, tries of a size.
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
        if not alone or alone.num < _MIN_SAMPLES or kind.is_old(alone):
            return 0
        limit_s, size = _MAX_STRETCH * alone.low_s, self._sizes[0]
        for larger in self._sizes[1:]:
            here, there = kind.known(size, context), kind.known(larger, context)
            if here is None:
                break
            is_open = there is None or kind.is_old(there)
            if here.median_s > limit_s:
                is_flat = there is not None and there.median_s <= _FLAT * here.median_s
                is_better = here.num >= _MIN_SAMPLES and (is_open or there.num < _MIN_SAMPLES or is_flat)
            else:
                # No row costs more than those before it: most of what it reads, they read already.
                guess_s = alone.low_s + larger / size * (here.high_s - alone.low_s)
                is_fit = there is not None and there.high_s <= limit_s
                is_better = is_fit or (is_open and guess_s <= limit_s)
            if not is_better:
                break
            size = larger
        return size

    def record(self, seconds: float, num_answers: int, num_rows: int, context: int = 0) -> None:
        """Learn from a pass; the arguments are those of `rows`, and what it took of prompts."""
        if num_answers:
            kind = self._kinds.setdefault(num_answers.bit_length(), _Kind())
            size = self._sizes[bisect_right(self._sizes, num_rows) - 1] if num_rows else 0
            kind.record(size, seconds, context)


class _Steps:
    """The last steps of one size."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.num = 0
        self.low_s = self.median_s = self.high_s = 0.0
        self.context = self.seen_at = 0

    def record(self, seconds: float, context: int, step: int) -> None:
        self._seconds.append(seconds)
        ranked, self.num = sorted(self._seconds), len(self._seconds)
        at = self.num // 4, (self.num - 1) // 2, max(0, self.num - 2)
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

    def is_old(self, steps: "_Steps") -> bool:
        """Whether what was found too slow then may be tried again."""
        return self._num_steps - steps.seen_at > _MAX_AGE

    def record(self, size: int, seconds: float, context: int) -> None:
        self._num_steps += 1
        known = self.known(size, context)
        if known is None or self.is_old(known):
            known = self._by_size[size] = _Steps()
        known.record(seconds, context, self._num_steps)


def _sizes(max_rows: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the most."""
    powers = [1 << n for n in range(max_rows.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2) if size < max_rows}
    return sorted({*sizes, max_rows})
