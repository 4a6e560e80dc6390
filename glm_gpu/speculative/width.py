"""How many drafted tokens are worth verifying, from measured acceptance and measured time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm_gpu.speculative.acceptance import MAX_WIDTH, Acceptance, DepthCounts
from glm_gpu.speculative.times import PassTimes, coarse, pass_cost

# What speculation must promise over plain decoding before it is used.
MIN_GAIN = 1.02

# A plain pass is timed at least this often.
_PLAIN_EVERY = 32
# A further token that comes true less often than this is not worth the time to think about it.
_MIN_CHANCE = 0.05
# While nothing pays, one draft is tried after so many passes, then after twice as many, and so on: a probe costs some
# three plain passes on a small model, most of them for the rows that the multi-token layer has missed.
_PROBE_EVERY, _PROBE_AT_MOST = 128, 1024
# So many passes before a probe the multi-token layer is given text to go on, and behind it time to be taken up.
_READY_BEFORE, _READY_BEHIND = 32, 8
# Once so many looks in a row found nothing that pays, one pass in so many is looked at: a look takes 2 % of a pass of
# the demo's, and text that repeats goes on longer than this.
_REST_BEHIND, _LOOK_EVERY = 16, 8
# What a new time of guessing counts against those before it.
_NEW_SHARE = 0.1

# First guesses of a sound multi-token layer are right 25 % of the time on any text; below this something is wrong.
HEALTHY_ACCEPTANCE, _HEALTH_TRIALS = 0.05, 128


@dataclass(frozen=True)
class Offer:
    """What could be drafted for one sequence.

    Args:
        limit: at most so many tokens.
        free: the source of a draft that is there already, and its length.
        costly: a source that takes time to draft, for any length.
        backlog: rows that the costly one has to run first.
    """

    limit: int
    free: tuple[str, int] | None = None
    costly: str | None = None
    backlog: int = 0

    def widths(self, is_costly: bool) -> tuple[str, int] | None:
        """The free or the costly source and how many of its tokens could be used; None for none."""
        source, length = (self.costly, MAX_WIDTH) if is_costly else self.free or (None, 0)
        length = min(length, self.limit, MAX_WIDTH)
        return (source, length) if source is not None and length > 0 else None


@dataclass(frozen=True)
class Choice:
    """Which drafter to use for a sequence in the next pass, and for how many tokens; no source and 0: none."""

    source: str | None = None
    width: int = 0


_NONE = Choice()


@dataclass(frozen=True)
class Decision:
    """What is drafted for each sequence of the next pass, and the speed expected of it against a plain pass."""

    choices: tuple[Choice, ...] = ()
    gain: float = 1.0

    @property
    def width(self) -> int:
        """Tokens drafted, all sequences together."""
        return sum(choice.width for choice in self.choices)

    @property
    def sources(self) -> list[str]:
        """The drafters used."""
        return sorted({choice.source for choice in self.choices if choice.source is not None})


class WidthPolicy:
    """Picks drafters and widths so that tokens a second are the most; one for all sequences of an engine.

    The expected tokens of a pass come from acceptance, its cost from passes with as many rows, which includes the
    expert loads that extra rows cause: where the disk limits, a pass with two rows takes nearly twice as long, and the
    width falls to zero. So it does where many sequences share a pass, for its rows already keep the processor busy.
    Untried widths are first taken to be cheap, so each is tried a few times.

    Args:
        min_width: 1 keeps drafting even where it does not pay.
        fixed_width: always draft so many tokens.
    """

    def __init__(self, min_width: int = 0, fixed_width: int | None = None) -> None:
        self.acceptance = Acceptance()
        self.last = Decision()
        self._min_width, self._fixed_width = min_width, fixed_width
        self._times: dict[int, PassTimes] = {}
        self._num_sequences = 1
        self._draft_s: dict[int, float] = {}
        self._probe_in = self._probe_every = _PROBE_EVERY
        self._num_idle = 0
        # What `_best_alone` went by last, those things themselves (so that no others take their ids), what came of it.
        self._known: tuple[tuple, tuple, Decision] | None = None

    def times(self, num_sequences: int) -> PassTimes:
        """What passes over so many sequences cost."""
        times = self._times.get(num_sequences)
        if times is None:
            times = self._times[num_sequences] = PassTimes(num_sequences)
        return times

    @property
    def wants_costly(self) -> bool:
        """Whether a source that takes time pays as far as is known, or is tried about now, so that what prepares it is
        worth doing."""
        is_about_now = self._probe_in <= _READY_BEFORE or self._probe_every - self._probe_in < _READY_BEHIND
        return self._probe_every == _PROBE_EVERY or is_about_now

    def rests(self, num_sequences: int) -> bool:
        """Whether the next pass over so many sequences is a plain one without a look at what could be drafted.

        Asked once for each pass: it counts them.
        """
        if num_sequences != self._num_sequences or self._min_width or self._fixed_width:
            self._num_idle = 0
        if self._num_idle < _REST_BEHIND or self._probe_in <= 1:
            return False
        self._num_idle += 1
        if self._num_idle % _LOOK_EVERY == 0:
            return False
        self._probe_in -= 1
        return True

    def drafted(self, num_sequences: int, width: int, seconds: float) -> None:
        """Time that guessing took, so many tokens for each of some sequences together."""
        each = seconds / width
        known = self._draft_s.get(num_sequences, each)
        self._draft_s[num_sequences] = (1 - _NEW_SHARE) * known + _NEW_SHARE * each

    def judge(self, source: str, token_ids: Sequence[int], truth: Sequence[int]) -> None:
        """Compare a draft, verified or not, with what came; behind a right guess the next pass is looked at."""
        self.acceptance.observe(source, token_ids, truth)
        if token_ids and truth and token_ids[0] == truth[0]:
            self._num_idle = min(self._num_idle, _REST_BEHIND - 1)

    def choose(self, offers: Sequence[Offer]) -> Decision:
        """What to draft for the next pass, which has a row for each offer's sequence at least."""
        self._num_sequences = len(offers)
        self.last = self._choose(offers)
        self._num_idle = 0 if self.last.width else self._num_idle + 1
        return self.last

    def _choose(self, offers: Sequence[Offer]) -> Decision:
        plain = Decision((_NONE,) * len(offers))
        if not any(offer.widths(False) or offer.widths(True) for offer in offers):
            return plain
        if self._fixed_width is not None:
            found = [offer.widths(False) or offer.widths(True) or (None, 0) for offer in offers]
            return Decision(tuple(Choice(source, min(width, self._fixed_width)) for source, width in found))
        if self.times(len(offers)).plain_age > _PLAIN_EVERY:
            return plain
        best = self._best_alone(offers[0]) if len(offers) == 1 else self._best(offers)
        if best.width and (best.gain >= MIN_GAIN or self._min_width):
            if any(offer.costly in best.sources for offer in offers):
                self._probe_in = self._probe_every = _PROBE_EVERY
            return best
        return self._probe(offers, plain)

    def _best_alone(self, offer: Offer) -> Decision:
        """`_best` for one sequence, in a third of the time: on a small model a pass takes little more than a choice.

        Nothing is worked out again while what it goes by is the same: tables and chances are never altered, but made
        anew.
        """
        times = self.times(1)
        table, sources = times.table(), (offer.widths(False), offer.widths(True))
        chances = [None if found is None else self.acceptance.chances(found[0]) for found in sources]
        basis = (id(table), *sources, *map(id, chances), self._draft_s.get(1))
        if self._known is not None and self._known[0] == basis:
            return self._known[2]
        best_gain, best = 0.0, _NONE
        for is_costly, found in enumerate(sources):
            if found is None:
                continue
            step_s = self._step_s(1) / times.plain_s if is_costly else 0.0
            tokens = 1.0
            for width, chance in enumerate(chances[is_costly][: found[1]], start=1):
                cost = pass_cost(table, 1 + width) if width == 1 or chance > _MIN_CHANCE else None
                if cost is None:
                    break
                tokens += chance
                gain = tokens / (cost + width * step_s)
                if gain > best_gain:
                    best_gain, best = gain, Choice(found[0], width)
        self._known = basis, (table, chances), Decision((best,), best_gain)
        return self._known[2]

    def _best(self, offers: Sequence[Offer]) -> Decision:
        times = self.times(len(offers))
        table, plain_s, num = times.table(), times.plain_s, len(offers)
        best_gain, best_steps = 0.0, []
        for sources in self._mixtures(offers):
            steps = sorted(
                (-chance, depth, index)
                for index, found in enumerate(sources)
                if found is not None
                for depth, chance in enumerate(self.acceptance.chances(found[0])[: found[1]], start=1)
                if depth == 1 or chance > _MIN_CHANCE
            )
            costly = [
                found is not None and found[0] == offer.costly for found, offer in zip(sources, offers, strict=True)
            ]
            step_s = self._step_s(sum(costly)) / plain_s if any(costly) else 0.0
            tokens, depth_guessed = float(num), 0
            for num_extra, (chance, depth, index) in enumerate(steps, start=1):
                tokens -= chance
                if costly[index]:
                    depth_guessed = max(depth_guessed, depth)
                if coarse(num_extra) != num_extra and num_extra != len(steps):
                    continue
                cost = pass_cost(table, num + num_extra)
                if cost is None:
                    break
                gain = tokens / num / (cost + depth_guessed * step_s)
                if gain > best_gain:
                    best_gain, best_steps, best_sources = gain, steps[:num_extra], sources
        if not best_steps:
            return Decision((_NONE,) * num, 0.0)
        widths = [0] * num
        for _, _, index in best_steps:
            widths[index] += 1
        return Decision(
            tuple(Choice(best_sources[i][0], width) if width else _NONE for i, width in enumerate(widths)), best_gain
        )

    def _mixtures(self, offers: Sequence[Offer]) -> Iterator[list[tuple[str, int] | None]]:
        """Ways to pick a source for each sequence: free ones alone, costly ones alone, for each the likelier one."""
        free, costly = ([offer.widths(is_costly) for offer in offers] for is_costly in (False, True))
        if any(free):
            yield free
        if any(costly):
            yield costly
        if any(free) and any(costly):
            yield [
                max((f, c), key=lambda found: self.acceptance.chances(found[0])[0]) if f and c else f or c
                for f, c in zip(free, costly, strict=True)
            ]

    def _step_s(self, num_sequences: int) -> float:
        """Seconds that guessing one token for each of so many sequences takes; of untried numbers, the next smaller."""
        known = [num for num in sorted(self._draft_s) if num <= num_sequences]
        return self._draft_s[known[-1]] if known else 0.0

    def _probe(self, offers: Sequence[Offer], plain: Decision) -> Decision:
        """Once in a while one token of a drafter that is off: for the sequence that is readiest, if it costs time."""
        self._probe_in -= 1
        if self._probe_in > 0:
            return plain
        is_costly = any(offer.widths(True) for offer in offers)
        able = [index for index, offer in enumerate(offers) if offer.widths(is_costly)]
        self._probe_every = min(2 * self._probe_every, _PROBE_AT_MOST)
        self._probe_in = self._probe_every
        chosen = min(able, key=lambda index: offers[index].backlog)
        probe = Choice(offers[chosen].widths(is_costly)[0], 1)
        return Decision(tuple(probe if index == chosen else _NONE for index in range(len(offers))))

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
        times = self.times(self._num_sequences)
        table, lines = times.table(), []
        if self.last.width:
            each = f" for {self._num_sequences} answers" if self._num_sequences > 1 else ""
            lines.append(
                f"speculation: {self.last.width} tokens by {' and '.join(self.last.sources)}{each}, "
                f"{self.last.gain:.2f} times plain"
            )
        elif table:
            lines.append("speculation: off now, no drafts that pay")
        for source, depths in sorted(self.acceptance.counts.items()):
            shares = [f"{100 * depth.right / depth.tried:.0f} %" for depth in depths if depth.tried]
            lines.append(f"drafts by {source}: {', '.join(shares)} right by depth, {depths[0].tried} tried")
        if times.plain_s is not None:
            shown = ", ".join(f"{rows} cost {cost:.2f}" for rows, cost in table.items() if rows > times.num_sequences)
            rows = "one row" if times.num_sequences == 1 else f"{times.num_sequences} rows"
            lines.append(f"a pass with {rows} takes {1e3 * times.plain_s:.1f} ms{shown and ' = 1; rows: '}{shown}")
        return lines + ([self.warning] if self.warning else [])

    def as_dict(self) -> dict:
        """The same for --json and metrics."""
        times = self.times(self._num_sequences)
        return {
            "sequences": self._num_sequences,
            "sources": self.last.sources,
            "width": self.last.width,
            "gain": round(self.last.gain, 3),
            "drafts": {
                source: {"tried": [depth.tried for depth in depths], "right": [depth.right for depth in depths]}
                for source, depths in sorted(self.acceptance.counts.items())
            },
            "plain_pass_s": times.plain_s,
            "pass_cost": {str(rows): round(cost, 3) for rows, cost in times.table().items()},
            "draft_s": round(self._step_s(self._num_sequences), 6),
            "warning": self.warning,
        }
