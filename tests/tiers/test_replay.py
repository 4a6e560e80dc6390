"""Replay by hand-made traces whose outcome is known, and against the optimum found by trying everything."""

from functools import lru_cache

import numpy as np
import pytest

from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.replay import (
    ByHeat,
    Clairvoyant,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    StaticHeat,
    learned,
    replay,
)
from glm_gpu.tiers.trace import Routing, Trace, TraceHeader


def make_trace(passes: list[tuple[int, list]], num_layers=2, num_experts=6, slab_nbytes=None) -> Trace:
    """Passes as (layer, experts of one token) or (layer, [experts of each token])."""
    ids = [np.array(experts) if isinstance(experts[0], list) else np.array([experts]) for _, experts in passes]
    routings = [
        Routing("decode" if len(i) == 1 else "prefill", layer, i) for (layer, _), i in zip(passes, ids, strict=True)
    ]
    sizes = slab_nbytes or (10,) * num_layers
    return Trace(TraceHeader("x", num_layers, num_experts, ids[0].shape[1], sizes), routings, False)


def random_trace(seed: int, num_passes: int, experts_per_tok: int = 1, num_experts: int = 5) -> Trace:
    rng = np.random.default_rng(seed)
    return make_trace(
        [(n % 2, rng.permutation(num_experts)[:experts_per_tok].tolist()) for n in range(num_passes)],
        num_experts=num_experts,
    )


def misses(trace: Trace, policy, slots: int) -> int:
    result = replay(trace, policy, slots * 10)
    return sum(result.uses.values()) - sum(result.hits.values())


def test_lru_gives_up_what_was_used_longest_ago():
    #                 a miss  b miss  a hit   c miss: b goes   a hit   b miss
    trace = make_trace([(0, [0]), (0, [1]), (0, [0]), (0, [2]), (0, [0]), (0, [1])])
    result = replay(trace, LeastRecentlyUsed(trace.header), 20)
    assert (result.hits["decode"], result.uses["decode"], result.read_bytes["decode"]) == (2, 6, 40)


def test_lfu_keeps_what_was_used_most():
    #                                            b miss  c miss: b goes  a hit
    trace = make_trace([(0, [0]), (0, [0]), (0, [0]), (0, [1]), (0, [2]), (0, [0]), (0, [2])])
    result = replay(trace, LeastFrequentlyUsed(trace.header), 20)
    assert result.hits["decode"] == 4


def test_static_heat_lets_cold_experts_pass_through_one_slot():
    uses = np.zeros((2, 6))
    uses[0] = [9, 8, 3, 2, 1, 0]
    trace = make_trace([(0, [0]), (0, [1]), (0, [2]), (0, [3]), (0, [0]), (0, [1]), (0, [5]), (0, [0]), (0, [1])])
    result = replay(trace, StaticHeat(uses), 30)
    assert result.hits["decode"] == 4


def test_memory_may_begin_full_and_what_lies_elsewhere_does_not_count():
    trace = make_trace([(0, [0, 5]), (1, [1, 2]), (0, [3, 5]), (0, [0, 3])])
    resident, elsewhere = np.zeros((2, 6), bool), np.zeros((2, 6), bool)
    resident[0, [0, 1]], elsewhere[0, 5] = True, True
    result = replay(trace, LeastRecentlyUsed(trace.header), 30, resident, elsewhere)
    #                    0 there       both read, (0, 1) goes   3 read, 0 goes   0 read, 3 there
    assert result.num_hits == [1, 0, 0, 1] and result.num_missed == [0, 2, 1, 1]
    assert (result.hits["decode"], result.uses["decode"], result.read_bytes["decode"]) == (2, 6, 40)


def test_experts_of_the_pass_are_not_evicted_for_each_other():
    trace = make_trace([(0, [0, 1]), (0, [2, 3]), (0, [2, 3])])
    worst = StaticHeat(np.array([[9, 8, 1, 0, 0, 0]] * 2))  # values those of the pass the least
    result = replay(trace, worst, 20)
    assert result.hits["decode"] == 2


def test_a_pass_larger_than_memory_is_computed_in_groups():
    trace = make_trace([(0, [[0, 1], [2, 3], [4, 5]]), (0, [[0, 1], [2, 3], [4, 5]])])
    for slots in (1, 2, 5):
        result = replay(trace, LeastRecentlyUsed(trace.header), slots * 10)
        assert result.uses["prefill"] == 12
        assert result.hits["prefill"] <= slots


def test_all_resident_reads_each_expert_once():
    trace = random_trace(1, 200, 3)
    for policy in (ByHeat(Heat(2, 5)), LeastRecentlyUsed(trace.header), Clairvoyant(trace)):
        result = replay(trace, policy, 100)
        assert result.read_bytes["decode"] == 100
        assert result.hit_rate() == 1 - 10 / 600


def test_sizes_of_slabs_count():
    trace = make_trace([(0, [0]), (1, [0]), (0, [1]), (0, [0])], slab_nbytes=(10, 25))
    result = replay(trace, LeastRecentlyUsed(trace.header), 35)
    assert result.read_bytes["decode"] == 10 + 25 + 10 + 10  # the third read evicts the first expert: no room for two


def fewest_misses(trace: Trace, slots: int) -> int:
    """By trying every choice of what to keep."""
    needs = [frozenset((r.layer, int(e)) for e in r.ids.ravel()) for r in trace.routings]

    @lru_cache(None)
    def best(index: int, here: frozenset) -> int:
        if index == len(needs):
            return 0
        missing = needs[index] - here
        options = {here | missing}
        while any(len(option) > slots for option in options):
            options = {option - {key} for option in options if len(option) > slots for key in option - needs[index]} | {
                option for option in options if len(option) <= slots
            }
        return len(missing) + min(best(index + 1, option) for option in options)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("experts_per_tok", "slots"), [(1, 2), (1, 4), (2, 3), (2, 5)])
def test_clairvoyant_reads_the_fewest_possible(seed, experts_per_tok, slots):
    trace = random_trace(seed, 24, experts_per_tok)
    assert misses(trace, Clairvoyant(trace), slots) == fewest_misses(trace, slots)


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_clairvoyant(seed):
    trace = random_trace(seed, 300, 2)
    for slots in (2, 4, 7):
        least = misses(trace, Clairvoyant(trace), slots)
        for policy in (ByHeat(Heat(2, 5)), LeastRecentlyUsed(trace.header), LeastFrequentlyUsed(trace.header)):
            assert misses(trace, policy, slots) >= least


def test_learned_heat_is_what_the_runs_counted():
    trace = random_trace(0, 100, 2)
    heat = learned([trace, trace])
    assert sum(int(uses.sum()) for uses in heat.uses.values()) == 400
