"""What passes cost by how many rows they have."""

import statistics
from collections import deque
from collections.abc import Sequence

# Costs kept of each number of rows, and after how many passes without a new one they are forgotten.
_WINDOW, _MAX_AGE = 48, 512
# A plain pass tells about so many passes behind it.
_NEAR = 8
# Fewer costs than this may be outliers: the least of them counts, so that one slow pass does not end a trial.
_MIN_COSTS = 4
# What one more row is taken to cost before it is tried, and no more than half of what each row there costs already; no
# more than twice the rows tried are tried next.
_UNTRIED_ROW = 0.05


class PassTimes:
    """What passes over some sequences cost by their number of rows, relative to a plain one with a row for each.

    Waiting for experts is part of it. A pass is compared only with plain passes just before it: the machine's other
    work changes how long everything takes from one second to the next, but hardly how many times a plain pass a wider
    one takes. A plain pass right behind a wider one counts to that: what it has to read again, the wider one evicted.

    Args:
        num_sequences: rows of a plain pass.
    """

    def __init__(self, num_sequences: int = 1) -> None:
        self.num_sequences = num_sequences
        self._plain: deque[tuple[int, float]] = deque(maxlen=_NEAR)
        self._costs: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        self._last_at: dict[int, int] = {}
        self._num_passes = 0
        self._last_size: int | None = None  # of the pass before, if it was a wider one
        self._table: dict[int, float] | None = None

    def observe(self, num_rows: int, seconds: float) -> None:
        self._num_passes += 1
        if num_rows == self.num_sequences:
            last_size, self._last_size = self._last_size, None
            near = self._near()
            if last_size is not None and near:
                self._costs[last_size][-1] += seconds * len(near) / sum(near) - 1
                self._settle(last_size)
                return
            self._plain.append((self._num_passes, seconds))
            if num_rows not in self._typical or self._num_passes % _MAX_AGE == 0:
                self._table = None
            self._typical[num_rows] = 1.0
            self._last_at[num_rows] = self._num_passes
            return
        near, self._last_size = self._near(), None
        if not near:
            return
        size = self.num_sequences + coarse(num_rows - self.num_sequences)
        if self.age(size) > _MAX_AGE:
            self._costs[size] = deque(maxlen=_WINDOW)
        self._costs[size].append(seconds * len(near) / sum(near))
        self._last_at[size], self._last_size = self._num_passes, size
        self._settle(size)

    def _settle(self, size: int) -> None:
        """Take in a new or altered cost."""
        self._typical[size] = typical(self._costs[size])
        self._table = None

    @property
    def plain_s(self) -> float | None:
        """What a plain pass takes, by the latest ones; None before the first."""
        latest = self._near() or [seconds for _, seconds in self._plain][-1:]
        return sum(latest) / len(latest) if latest else None

    def _near(self) -> list[float]:
        """What the plain passes just before now took."""
        return [seconds for at, seconds in self._plain if self._num_passes - at <= _NEAR]

    @property
    def plain_age(self) -> int:
        """Passes since a plain one."""
        return self.age(self.num_sequences)

    def age(self, num_rows: int) -> int:
        """Passes since one with so many rows."""
        return self._num_passes - self._last_at.get(num_rows, -_MAX_AGE - 1)

    def table(self) -> dict[int, float]:
        """Costs by number of rows, ascending, of those that there were passes of lately; to be left unchanged.

        Of the fewest beyond a plain pass the cost is never forgotten: what did not pay is tried again by probes only.

        More rows never cost less than fewer: where they seem to, the machine was busy when the fewer were timed.
        """
        if self._table is None:
            table, floor = {}, 0.0
            for rows in sorted(self._typical):
                if self.age(rows) <= _MAX_AGE or len(table) == 1:
                    floor = table[rows] = max(self._typical[rows], floor)
            self._table = table
        return self._table


def coarse(num_extra: int) -> int:
    """The number of further rows that it is counted as: exact up to 8, then to an eighth, so that each is met often."""
    if num_extra <= 8:
        return num_extra
    step = 1 << (num_extra.bit_length() - 3)
    return (num_extra + step // 2) // step * step


def typical(costs: Sequence[float]) -> float:
    """The mean of the middle half; of less than four, the least."""
    ordered = sorted(costs)
    if len(ordered) < _MIN_COSTS:
        return ordered[0]
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def pass_cost(table: dict[int, float], num_rows: int) -> float | None:
    """What a pass with so many rows would cost, going by `PassTimes.table`; None if that is too far from any."""
    if num_rows in table:
        return table[num_rows]
    below = max((rows for rows in table if rows < num_rows), default=None)
    above = min((rows for rows in table if rows > num_rows), default=None)
    if below is None or (above is None and num_rows > 2 * below):
        return None
    if above is None:
        return table[below] * (1 + min(_UNTRIED_ROW, 0.5 / below) * (num_rows - below))
    share = (num_rows - below) / (above - below)
    return table[below] + share * (table[above] - table[below])
