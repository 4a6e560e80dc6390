"""On recorded routing: the shipped policy against plain ones, and how soon a change of topic moves the hot set."""

from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.replay import ByHeat, StaticHeat, compare, learned, replay
from glm_gpu.tiers.trace import Trace, read_trace

KINDS = ("scripture", "plays", "chats")
FOLDER = Path(__file__).parents[1] / "data" / "traces"
# A change of topic has moved the hot set after so many tokens, four half-lives of the fast signal.
SETTLED_TOKENS = 128


@cache
def recorded(kind: str, run: str) -> Trace:
    return read_trace(FOLDER / f"{kind}.{run}.trace")


@cache
def first_half(kind: str) -> Trace:
    """Four prompts with their answers: the whole traces are compared by bench/policies.py."""
    trace = recorded(kind, "answers")
    return Trace(trace.header, trace.routings[: len(trace.routings) // 2], False)


def capacity(trace: Trace, share: float) -> int:
    return int(share * sum(trace.header.slab_nbytes) * trace.header.num_experts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.10, 0.25, 0.50])
def test_shipped_policy_beats_lru_lfu_and_static_heat_held_out(kind, share):
    trace = first_half(kind)
    heat = learned([recorded(other, "text") for other in KINDS if other != kind])
    shipped, *plain, optimum = compare(trace, capacity(trace, share), heat)
    assert [result.policy for result in plain] == ["LRU", "LFU", "static heat"]
    for result in plain:
        assert shipped.hit_rate("decode") > result.hit_rate("decode"), result.policy
        assert sum(shipped.read_bytes.values()) < sum(result.read_bytes.values()), result.policy
    assert shipped.hit_rate() < optimum.hit_rate()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.10, 0.25, 0.50])
def test_shipped_policy_beats_static_heat_that_knows_the_whole_run(kind, share):
    trace = recorded(kind, "answers")
    heat = learned([trace])
    static = replay(trace, StaticHeat(sum(heat.uses.values())), capacity(trace, share))
    heat.begin_run()
    assert replay(trace, ByHeat(heat), capacity(trace, share)).hit_rate("decode") > static.hit_rate("decode")


def tokens_of(trace: Trace, start: int, stop: int):
    """(layer, ids [1, K]) of single tokens from a trace of whole passes."""
    by_layer: dict[int, list] = {}
    for routing in trace.routings:
        by_layer.setdefault(routing.layer, []).append(routing.ids)
    rows = {layer: np.concatenate(parts)[start:stop] for layer, parts in by_layer.items()}
    for token in range(stop - start):
        for layer, ids in rows.items():
            yield layer, ids[token : token + 1]


def served(heat: Heat, kind: str) -> float:
    """The share of uses, from token 256 to 768 of a text, that the hottest quarter of experts would serve."""
    num_experts = heat.shape[1]
    is_hot = np.zeros(heat.shape, bool)
    hottest = np.argsort(-worth(heat), axis=None, kind="stable")[: 5 * num_experts // 4]
    is_hot.ravel()[hottest] = True
    return float(np.mean([is_hot[layer][ids] for layer, ids in tokens_of(recorded(kind, "text"), 256, 768)]))


@pytest.mark.parametrize(("before", "after"), list(permutations(KINDS, 2)))
def test_a_change_of_topic_moves_the_hot_set_within_128_tokens(before, after):
    """After 2,048 tokens of one topic and 128 of another, the hot set serves the new one 80 % as well as it could."""
    heat = learned([recorded(before, "text")])
    stale = served(heat, after)
    for layer, ids in tokens_of(recorded(after, "text"), 0, SETTLED_TOKENS):
        heat.count(layer, ids, "decode")
    best = served(learned([recorded(after, "text")]), after)
    assert served(heat, after) > 0.8 * best
    assert stale < 0.93 * best  # there was something to move
