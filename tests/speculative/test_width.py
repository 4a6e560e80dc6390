"""The width: what it comes to on machines and texts with known costs and acceptance."""

import numpy as np
import pytest

from glm_gpu.speculative import MAX_WIDTH, WidthPolicy
from glm_gpu.speculative.width import PassTimes, pass_cost

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
        self.tokens, self.seconds, self.widths = 0, 0.0, []

    def passes(self, num: int, mtp: float, ngram: float | None = None) -> "Run":
        """So many passes over text on which guesses are right with these chances; None: nothing repeats."""
        for _ in range(num):
            free = [("ngram 4", MAX_WIDTH)] if ngram is not None else []
            choice = self.policy.choose(free, ["mtp"], MAX_WIDTH)
            self.widths.append(choice.width)
            right = {source: self.rng.random(MAX_WIDTH) < p for source, p in (("mtp", mtp), ("ngram 4", ngram or 0))}
            num_right = 0
            if choice.source:
                num_right = int(np.cumprod(right[choice.source][: choice.width]).sum())
                truth = right[choice.source][: num_right + 1].astype(int).tolist()
            seconds = (self.base + self.row * (1 + choice.width)) * self.rng.uniform(0.95, 1.05)
            self.policy.times.observe(1 + choice.width, seconds)
            if choice.source == "mtp":
                self.policy.drafted("mtp", choice.width, self.draft * choice.width)
                seconds += self.draft * choice.width
                self.policy.acceptance.observe("mtp", [1] * choice.width, truth)
            if ngram is not None:
                is_used = choice.source == "ngram 4"
                truth = truth if is_used else right["ngram 4"][:1].astype(int).tolist()
                self.policy.acceptance.observe("ngram 4", [1] * MAX_WIDTH, truth)
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


def test_experts_that_become_resident_bring_the_width_back():
    run = Run(WidthPolicy(), **DISK_BOUND).passes(600, 0.7)
    run.base, run.row = RESIDENT["base"], RESIDENT["row"]
    run.passes(1500, 0.7)
    assert np.mean(run.widths[-200:]) > 1.5


def test_one_slow_pass_does_not_end_speculation():
    policy = WidthPolicy()
    policy.times.observe(1, 1.0)
    policy.times.observe(2, 50.0)
    policy.times.observe(2, 1.1)
    assert policy.choose([], ["mtp"], MAX_WIDTH).width >= 1


def test_untried_widths_are_approached_step_by_step():
    times = PassTimes()
    times.observe(1, 2.0)
    assert pass_cost(times.table(), 2) == pytest.approx(1.05)
    assert pass_cost(times.table(), 3) is None
    times.observe(4, 5.0)
    assert pass_cost(times.table(), 2) == pytest.approx(1.5)
    assert pass_cost(times.table(), 9) is None


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
    assert WidthPolicy(min_width=1).choose([], [], 8).width == 0


def test_limits_hold():
    policy = WidthPolicy(fixed_width=8)
    assert policy.choose([("ngram 4", 5)], [], 3).width == 3
    assert policy.choose([("ngram 4", 5)], [], 8).width == 5
    assert policy.choose([], ["mtp"], 40).width == MAX_WIDTH
    assert policy.choose([], ["mtp"], 0).width == 0


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
