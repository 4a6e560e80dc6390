"""The width: what it comes to on machines and texts with known costs and acceptance."""

import numpy as np
import pytest

from glm_gpu.speculative import MAX_WIDTH, Offer, WidthPolicy
from glm_gpu.speculative.times import PassTimes, coarse, pass_cost
from glm_gpu.speculative.width import Choice

# What a pass of some rows takes, with 1 for one row: everything in memory, half of the experts read, all of them.
RESIDENT = {"base": 0.85, "row": 0.15}
HALF = {"base": 0.5, "row": 0.5}
DISK_BOUND = {"base": 0.05, "row": 0.95}


class Run:
    """Plays a text against a policy: tokens a unit of time, where a plain pass takes 1.

    Args:
        base, row: a pass takes `base + row * rows`, with noise.
        draft: what a token of the multi-token layer takes.
    """

    def __init__(self, policy: WidthPolicy, base: float, row: float, draft: float = 0.05, seed: int = 0) -> None:
        self.policy, self.base, self.row, self.draft = policy, base, row, draft
        self.rng = np.random.default_rng(seed)
        self.tokens, self.seconds, self.widths, self.looks = 0, 0.0, [], 0

    def passes(self, num: int, mtp: float, ngram: float | None = None) -> "Run":
        """So many passes over text on which guesses are right with these chances; None: nothing repeats."""
        for _ in range(num):
            rests = self.policy.rests(1)
            free = ("ngram 4", MAX_WIDTH) if ngram is not None else None
            choice = Choice() if rests else self.policy.choose([Offer(MAX_WIDTH, free, "mtp")]).choices[0]
            self.looks += not rests
            self.widths.append(choice.width)
            right = {source: self.rng.random(MAX_WIDTH) < p for source, p in (("mtp", mtp), ("ngram 4", ngram or 0))}
            num_right = 0
            if choice.source:
                num_right = int(np.cumprod(right[choice.source][: choice.width]).sum())
                truth = right[choice.source][: num_right + 1].astype(int).tolist()
            seconds = (self.base + self.row * (1 + choice.width)) * self.rng.uniform(0.95, 1.05)
            self.policy.times(1).observe(1 + choice.width, seconds)
            if choice.source == "mtp":
                self.policy.drafted(1, choice.width, self.draft * choice.width)
                seconds += self.draft * choice.width
                self.policy.judge("mtp", [1] * choice.width, truth)
            if ngram is not None and not rests:
                is_used = choice.source == "ngram 4"
                truth = truth if is_used else right["ngram 4"][:1].astype(int).tolist()
                self.policy.judge("ngram 4", [1] * MAX_WIDTH, truth)
            self.tokens += 1 + num_right
            self.seconds += seconds
        return self

    @property
    def gain(self) -> float:
        return self.tokens / self.seconds


@pytest.mark.parametrize("machine", [RESIDENT, HALF, DISK_BOUND])
@pytest.mark.parametrize("acceptance", [0.02, 0.2, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("ngram", [None, 0.1, 0.6])
def test_automatic_width_never_costs_three_percent(machine, acceptance, ngram):
    assert Run(WidthPolicy(), **machine).passes(3000, acceptance, ngram).gain > 0.97


@pytest.mark.parametrize(("acceptance", "least"), [(0.7, 1.5), (0.4, 1.12)])
def test_what_pays_is_used(acceptance, least):
    assert Run(WidthPolicy(), **RESIDENT).passes(2000, acceptance).gain > least


def test_gain_comes_near_that_of_the_best_width():
    auto = Run(WidthPolicy(), **RESIDENT).passes(2000, 0.7).gain
    best = max(Run(WidthPolicy(fixed_width=n), **RESIDENT).passes(2000, 0.7).gain for n in range(1, MAX_WIDTH + 1))
    assert auto > 0.93 * best


def test_width_falls_to_zero_when_disk_bound_and_rises_when_text_repeats():
    run = Run(WidthPolicy(), **DISK_BOUND).passes(600, 0.4)
    assert np.mean(np.array(run.widths[300:]) == 0) > 0.97
    run = Run(WidthPolicy(), base=0.5, row=0.5).passes(400, 0.1, ngram=0.05)
    assert np.mean(run.widths[200:]) < 0.1
    run.passes(60, 0.1, ngram=0.97)
    assert np.mean(run.widths[-30:]) > 2


def test_where_nothing_pays_few_passes_are_looked_at_and_probes_come_all_the_same():
    run = Run(WidthPolicy(), **DISK_BOUND).passes(2000, 0.2, ngram=0.1)
    assert run.looks < 2000 / 4 and np.count_nonzero(run.widths[600:]) == 2
    assert not run.policy.rests(2), "other passes are looked at anew"


def test_the_layer_is_made_ready_for_a_probe_and_may_stay_behind_it():
    policy, wanted = WidthPolicy(), []
    for _ in range(60):
        policy.acceptance.observe("mtp", [1], [0])
    policy.times(1).observe(1, 1.0)
    policy.times(1).observe(2, 2.0)
    for _ in range(1000):
        policy.times(1).observe(1, 1.0)
        wanted.append((policy.wants_costly, not policy.rests(1) and policy.choose([Offer(8, costly="mtp")]).width > 0))
    probes = [at for at, (_, is_probe) in enumerate(wanted) if is_probe]
    assert probes == [127, 127 + 256, 127 + 256 + 512]
    for probe in probes[1:]:
        assert all(is_wanted for is_wanted, _ in wanted[probe - 30 : probe + 8])
        assert not any(is_wanted for is_wanted, _ in wanted[probe - 100 : probe - 32])


def test_experts_that_become_resident_bring_the_width_back():
    run = Run(WidthPolicy(), **DISK_BOUND).passes(600, 0.7)
    run.base, run.row = RESIDENT["base"], RESIDENT["row"]
    run.passes(1500, 0.7)
    assert np.mean(run.widths[-200:]) > 1.5


def test_one_slow_pass_does_not_end_speculation():
    policy = WidthPolicy()
    policy.times(1).observe(1, 1.0)
    policy.times(1).observe(2, 50.0)
    policy.times(1).observe(2, 1.1)
    assert policy.choose([Offer(MAX_WIDTH, costly="mtp")]).width >= 1


def test_untried_widths_are_approached_step_by_step():
    times = PassTimes()
    times.observe(1, 2.0)
    assert pass_cost(times.table(), 2) == pytest.approx(1.05)
    assert pass_cost(times.table(), 3) is None
    times.observe(4, 5.0)
    assert pass_cost(times.table(), 2) == pytest.approx(1.5)
    assert pass_cost(times.table(), 9) is None


def test_what_a_plain_pass_takes_longer_behind_a_wider_one_counts_to_that():
    times = PassTimes()
    for _ in range(12):
        for rows, seconds in ((1, 1.0), (1, 1.0), (1, 1.0), (2, 1.2), (1, 1.5), (1, 1.0), (2, 1.2), (2, 1.2), (1, 1.5)):
            times.observe(rows, seconds)
    assert times.table()[2] == pytest.approx(1.2 + 2 / 3 * 0.5, rel=0.1) and times.plain_s == pytest.approx(1.0)


def test_more_rows_never_seem_cheaper_than_fewer():
    times = PassTimes()
    for rows, seconds in ((1, 1.0), (2, 0.7), (4, 2.0), (8, 1.5)):
        times.observe(rows, seconds)
    assert list(times.table().values()) == [1.0, 1.0, 2.0, 2.0]


def test_costs_stay_what_they_are_while_the_machine_slows_down_and_recovers():
    times, rng = PassTimes(), np.random.default_rng(2)
    costs = {1: 1.0, 2: 1.3, 4: 1.9}
    for step in range(600):
        slowness = 4.0 if 200 <= step < 400 else 1.0
        rows = 1 if step % 40 == 0 else 4 if (step // 100) % 2 else 2
        times.observe(rows, 0.01 * slowness * costs[rows] * rng.uniform(0.9, 1.1))
    for rows, cost in times.table().items():
        assert cost == pytest.approx(costs[rows], rel=0.2)
    assert times.plain_s == pytest.approx(0.01, rel=0.2)


def test_a_named_drafter_always_drafts_and_off_never_does():
    run = Run(WidthPolicy(min_width=1), **DISK_BOUND).passes(300, 0.0)
    assert np.mean(np.array(run.widths) >= 1) > 0.96
    assert WidthPolicy(min_width=1).choose([Offer(8)]).width == 0


def test_limits_hold():
    policy = WidthPolicy(fixed_width=8)
    assert policy.choose([Offer(3, ("ngram 4", 5))]).width == 3
    assert policy.choose([Offer(8, ("ngram 4", 5))]).width == 5
    assert policy.choose([Offer(40, costly="mtp")]).width == MAX_WIDTH
    assert policy.choose([Offer(0, costly="mtp")]).width == 0


def test_implausible_acceptance_warns_and_plausible_does_not():
    for right, warns in ((1, True), (30, False)):
        policy = WidthPolicy()
        for n in range(150):
            assert policy.warning is None or n >= 128
            policy.acceptance.observe("mtp", [1], [1 if n % 100 < right else 0])
        assert (policy.warning is not None) == warns
    assert "1.3 % of 150" in (WidthPolicy().warning or "1.3 % of 150")


def test_decision_and_measurements_can_be_shown():
    policy = Run(WidthPolicy(), **RESIDENT).passes(200, 0.7).policy
    assert any("tokens by mtp" in line for line in policy.summary)
    assert any("right by depth" in line for line in policy.summary)
    shown = policy.as_dict()
    assert shown["width"] == policy.last.width and shown["drafts"]["mtp"]["tried"][0] > 100
    assert WidthPolicy().summary == []


class ManyRun:
    """Plays several sequences against a policy: a pass takes `base + row * rows`."""

    def __init__(self, policy: WidthPolicy, num: int, base: float, row: float, draft: float = 0.05) -> None:
        self.policy, self.num, self.base, self.row, self.draft = policy, num, base, row, draft
        self.rng = np.random.default_rng(3)
        self.tokens, self.seconds, self.widths = 0, 0.0, []

    def passes(self, num_passes: int, chance: float) -> "ManyRun":
        for _ in range(num_passes):
            decision = self.policy.choose([Offer(MAX_WIDTH, costly="mtp")] * self.num)
            widths = [choice.width for choice in decision.choices]
            self.widths.append(sum(widths))
            seconds = (self.base + self.row * (self.num + sum(widths))) * self.rng.uniform(0.95, 1.05)
            self.policy.times(self.num).observe(self.num + sum(widths), seconds)
            num_guessing = sum(width > 0 for width in widths)
            if num_guessing:
                self.policy.drafted(num_guessing, max(widths), self.draft * max(widths))
                seconds += self.draft * max(widths)
            for width in widths:
                num_right = int(np.cumprod(self.rng.random(width) < chance).sum())
                self.policy.acceptance.observe("mtp", [1] * width, ([1] * num_right + [0])[:width])
                self.tokens += 1 + num_right
            self.seconds += seconds
        return self

    @property
    def gain(self) -> float:
        return self.tokens / self.seconds * (self.base + self.row * self.num) / self.num


@pytest.mark.parametrize("num", [2, 4, 8, 32])
@pytest.mark.parametrize("row_share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("chance", [0.02, 0.3, 0.7])
def test_many_sequences_never_lose_three_percent(num, row_share, chance):
    """`row_share`: how much of a plain pass over all of them grows with its rows."""
    run = ManyRun(WidthPolicy(), num, 1 - row_share, row_share / num)
    assert run.passes(2000, chance).gain > 0.97


def test_many_sequences_gain_where_rows_are_cheap_and_stay_plain_where_rows_are_all_the_work():
    assert ManyRun(WidthPolicy(), 4, 0.9, 0.1 / 4).passes(1000, 0.7).gain > 1.7
    run = ManyRun(WidthPolicy(), 32, 0.05, 0.95 / 32).passes(600, 0.4)
    assert np.mean(np.array(run.widths[300:]) == 0) > 0.97


def test_the_likelier_source_of_each_sequence_is_used():
    policy = WidthPolicy()
    for _ in range(40):
        policy.acceptance.observe("mtp", [1], [1])
        policy.acceptance.observe("ngram 2", [1], [0])
        policy.acceptance.observe("ngram 32", [1], [1])
        policy.acceptance.observe("mtp", [1], [0])
    for rows, seconds in ((3, 1.0), (6, 1.01), (12, 1.02)):
        policy.times(3).observe(rows, seconds)
    offers = [Offer(8, ("ngram 2", 8), "mtp"), Offer(8, ("ngram 32", 8), "mtp"), Offer(8, None, "mtp")]
    decision = policy.choose(offers)
    assert [choice.source for choice in decision.choices] == ["mtp", "ngram 32", "mtp"]
    assert decision.choices[1].width > decision.choices[0].width


def test_a_probe_asks_the_sequence_that_is_readiest():
    policy = WidthPolicy()
    for _ in range(60):
        policy.acceptance.observe("mtp", [1], [0])
    policy.times(2).observe(2, 1.0)
    policy.times(2).observe(4, 2.0)
    offers = [Offer(8, costly="mtp", backlog=9), Offer(8, costly="mtp", backlog=2)]
    found = []
    for _ in range(140):
        found.append([choice.width for choice in policy.choose(offers).choices])
        policy.times(2).observe(2, 1.0)
    assert found.count([0, 1]) == 1 and found.count([0, 0]) == 139 and not policy.wants_costly


def test_numbers_of_rows_are_counted_together_within_an_eighth():
    assert [coarse(n) for n in range(9)] == list(range(9))
    for n in range(9, 300):
        assert abs(coarse(n) - n) <= n / 8 and coarse(coarse(n)) == coarse(n)


@pytest.mark.parametrize("changed", ["rows cost more", "guessing takes longer"])
def test_a_choice_is_made_anew_when_costs_change_and_chances_do_not(changed):
    policy, offer = WidthPolicy(), Offer(1, costly="mtp")
    for _ in range(60):
        policy.acceptance.observe("mtp", [1], [1])
    policy.drafted(1, 1, 0.01)
    for _ in range(60):
        policy.times(1).observe(1, 1.0)
        policy.times(1).observe(2, 1.1)
    assert policy.choose([offer]).width > 0
    for _ in range(60):
        policy.times(1).observe(1, 1.0)
        if changed == "rows cost more":
            policy.times(1).observe(2, 3.0)
        else:
            policy.drafted(1, 1, 2.0)
    assert policy.choose([offer]).width == 0
