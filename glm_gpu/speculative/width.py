"""How many drafted tokens are worth verifying, from measured acceptance and measured time."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# Guesses verified in one pass at most: beyond, even text that repeats gains little, and prefetching stops.
MAX_WIDTH = 8
# What speculation must promise over plain decoding before it is used.
MIN_GAIN = 1.02

# Old guesses count less: a window of about thirty.
_DECAY = 0.97
# Before there are guesses: what to expect of the first, and how many guesses that is worth.
_PRIOR, _PRIOR_TRIALS = 0.5, 2.0

# Costs kept of each number of rows, and after how many passes without a new one they are forgotten.
_WINDOW, _MAX_AGE = 48, 512
# A plain pass is timed at least this often, and tells about so many passes behind it.
_PLAIN_EVERY, _NEAR = 32, 8
# Fewer costs than this may be outliers: the least of them counts, so that one slow pass does not end a trial.
_MIN_COSTS = 4
# What one more row is taken to cost before it is tried, and that no more than twice the rows tried are tried next.
_UNTRIED_ROW = 0.05
# A further token that comes true less often than this is not worth the time to think about it.
_MIN_CHANCE = 0.05
# A drafter whose guesses cost time is tried again after so many passes without it, then after twice as many, and so on.
_PROBE_EVERY, _PROBE_AT_MOST = 64, 1024

# First guesses of a sound multi-token layer are right 25 % of the time on any text; below this something is wrong.
HEALTHY_ACCEPTANCE, _HEALTH_TRIALS = 0.05, 128


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

    def observe(self, source: str, token_ids: Sequence[int], truth: Sequence[int]) -> None:
        """Compare a draft, verified or not, with what came."""
        if not token_ids:
            return
        depths = self.counts.setdefault(source, [DepthCounts() for _ in range(MAX_WIDTH)])
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


class PassTimes:
    """What passes cost by their number of rows, relative to a plain one; waiting for experts is part of it.

    A pass is compared only with plain passes just before it: the machine's other work changes how long everything takes
    from one second to the next, but hardly how many times a plain pass a wider one takes.
    """

    def __init__(self) -> None:
        self.plain_s: float | None = None
        self._plain: deque[tuple[int, float]] = deque(maxlen=_NEAR)
        self._costs: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        self._last_at: dict[int, int] = {}
        self._num_passes = 0

    def observe(self, num_rows: int, seconds: float) -> None:
        self._num_passes += 1
        if num_rows == 1:
            self._plain.append((self._num_passes, seconds))
        near = [s for at, s in self._plain if self._num_passes - at <= _NEAR]
        if not near:
            return
        self.plain_s = statistics.fmean(near)
        if self.age(num_rows) > _MAX_AGE:
            self._costs[num_rows] = deque(maxlen=_WINDOW)
        self._costs[num_rows].append(1.0 if num_rows == 1 else seconds / self.plain_s)
        self._typical[num_rows] = typical(self._costs[num_rows])
        self._last_at[num_rows] = self._num_passes

    def age(self, num_rows: int) -> int:
        """Passes since one with so many rows."""
        return self._num_passes - self._last_at.get(num_rows, -_MAX_AGE - 1)

    def table(self) -> dict[int, float]:
        """Costs by number of rows, ascending, of those that there were passes of lately.

        More rows never cost less than fewer: where they seem to, the machine was busy when the fewer were timed.
        """
        table, floor = {}, 0.0
        for rows in sorted(self._typical):
            if self.age(rows) <= _MAX_AGE:
                floor = table[rows] = max(self._typical[rows], floor)
        return table


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
        return table[below] * (1 + _UNTRIED_ROW * (num_rows - below))
    share = (num_rows - below) / (above - below)
    return table[below] + share * (table[above] - table[below])


@dataclass(frozen=True)
class Choice:
    """Which drafter to use for the next pass, and for how many tokens; no source and 0: a plain pass."""

    source: str | None = None
    width: int = 0
    gain: float = 1.0


class WidthPolicy:
    """Picks drafter and width so that tokens a second are the most; one for all sequences of an engine.

    The expected tokens of a pass come from acceptance, its cost from passes with as many rows, which includes the
    expert loads that extra rows cause: where the disk limits, a pass with two rows takes nearly twice as long, and the
    width falls to zero. Untried widths are first taken to be cheap, so each is tried a few times.

    Args:
        min_width: 1 keeps drafting even where it does not pay.
        fixed_width: always draft so many tokens.
    """

    def __init__(self, min_width: int = 0, fixed_width: int | None = None) -> None:
        self.acceptance = Acceptance()
        self.times = PassTimes()
        self.last = Choice()
        self._min_width, self._fixed_width = min_width, fixed_width
        self._draft_cost: dict[str, float] = {}
        self._probe_in = self._probe_every = _PROBE_EVERY

    def drafted(self, source: str, width: int, seconds: float) -> None:
        """Time that guessing took."""
        if self.times.plain_s is not None:
            cost = seconds / width / self.times.plain_s
            self._draft_cost[source] = 0.9 * self._draft_cost.get(source, cost) + 0.1 * cost

    def choose(self, free: Sequence[tuple[str, int]], costly: Sequence[str], limit: int) -> Choice:
        """What to draft for the next pass.

        Args:
            free: sources whose draft is there already, with its length.
            costly: sources that take time to draft, for any length.
            limit: at most so many tokens.
        """
        offers = [(source, min(width, limit, MAX_WIDTH)) for source, width in free]
        offers += [(source, min(limit, MAX_WIDTH)) for source in costly]
        offers = [(source, width) for source, width in offers if width > 0]
        self.last = self._choose(offers, set(costly))
        return self.last

    def _choose(self, offers: list[tuple[str, int]], costly: set[str]) -> Choice:
        if not offers:
            return Choice()
        if self._fixed_width is not None:
            source, width = offers[0]
            return Choice(source, min(width, self._fixed_width))
        if self.times.age(1) > _PLAIN_EVERY:
            return Choice()
        best = self._best(offers)
        if best.width and (best.gain >= MIN_GAIN or self._min_width):
            if best.source in costly:
                self._probe_in = self._probe_every = _PROBE_EVERY
            return best
        return self._probe([source for source, _ in offers if source in costly])

    def _best(self, offers: list[tuple[str, int]]) -> Choice:
        table, best = self.times.table(), Choice(gain=0.0)
        for source, max_width in offers:
            tokens, chance, draft_cost = 1.0, 1.0, self._draft_cost.get(source, 0.0)
            for width, rate in enumerate(self.acceptance.rates(source)[:max_width], start=1):
                chance *= rate
                cost = pass_cost(table, 1 + width) if width == 1 or chance > _MIN_CHANCE else None
                if cost is None:
                    break
                tokens += chance
                gain = tokens / (cost + width * draft_cost)
                if gain > best.gain:
                    best = Choice(source, width, gain)
        return best

    def _probe(self, costly: list[str]) -> Choice:
        """Once in a while one token of a drafter that is off, to see whether that is still right."""
        self._probe_in -= 1
        if self._probe_in > 0 or not costly:
            return Choice()
        self._probe_every = min(2 * self._probe_every, _PROBE_AT_MOST)
        self._probe_in = self._probe_every
        return Choice(costly[0], 1)

    @property
    def warning(self) -> str | None:
        """What is wrong with the multi-token layer, if its guesses come true less often than any sound one's."""
        first = self.acceptance.counts.get("mtp", [DepthCounts()])[0]
        if first.tried < _HEALTH_TRIALS or first.right >= HEALTHY_ACCEPTANCE * first.tried:
            return None
        return (
            f"only {100 * first.right / first.tried:.1f} % of {first.tried} multi-token (MTP) guesses came true, "
            "expected 25 % or more: the checkpoint's MTP layer is damaged or does not belong to it; "
            "fetch or convert it again, or use --speculate ngram"
        )

    @property
    def summary(self) -> list[str]:
        """What was decided last and why, a line each, for people: none before anything was drafted or timed."""
        table = self.times.table()
        lines = []
        if self.last.width:
            lines.append(
                f"speculation: {self.last.width} tokens by {self.last.source}, {self.last.gain:.2f} times plain"
            )
        elif table:
            lines.append("speculation: off now, no drafts that pay")
        for source, depths in sorted(self.acceptance.counts.items()):
            shares = [f"{100 * depth.right / depth.tried:.0f} %" for depth in depths if depth.tried]
            lines.append(f"drafts by {source}: {', '.join(shares)} right by depth, {depths[0].tried} tried")
        if self.times.plain_s is not None:
            shown = ", ".join(f"{rows} cost {cost:.2f}" for rows, cost in table.items() if rows > 1)
            lines.append(
                f"a pass with one row takes {1e3 * self.times.plain_s:.1f} ms{shown and ' = 1; rows: '}{shown}"
            )
        return lines + ([self.warning] if self.warning else [])

    def as_dict(self) -> dict:
        """The same for --json and metrics."""
        return {
            "source": self.last.source,
            "width": self.last.width,
            "gain": round(self.last.gain, 3),
            "drafts": {
                source: {"tried": [depth.tried for depth in depths], "right": [depth.right for depth in depths]}
                for source, depths in self.acceptance.counts.items()
            },
            "plain_pass_s": self.times.plain_s,
            "pass_cost": {str(rows): round(cost, 3) for rows, cost in self.times.table().items()},
            "draft_cost": {source: round(cost, 3) for source, cost in self._draft_cost.items()},
            "warning": self.warning,
        }
