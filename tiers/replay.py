"""Replay a routing trace against any policy and any amount of memory: what would have been hit, what read.

The rules are the store's: a pass needs its layer's experts, those in memory are hits, the others are read, and the
least worth that the pass does not hold make room. An expert must come to be computed, but is the first to go again when
it is worth the least. A pass that needs more experts than memory holds computes them in groups.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.tiers.heat import PHASES, Heat
from glm_gpu.tiers.policy import Ranking, layer_worth
from glm_gpu.tiers.trace import Routing, Trace, TraceHeader


class Policy(Protocol):
    """Says how much experts are worth in memory, as a run goes on."""

    name: str

    def see(self, index: int, routing: Routing) -> None:
        """Take in the choices of pass number `index`, before its experts are needed."""

    def row_worth(self, layer: int) -> np.ndarray:
        """[E] f64: a layer's experts, higher means keep. Changes only when that layer is seen."""


class ByHeat:
    """What ships: `glm_gpu.tiers.policy`.

    Args:
        heat: what earlier runs learned; counted on.
    """

    name = "glm-gpu"

    def __init__(self, heat: Heat) -> None:
        self._heat = heat

    def see(self, index: int, routing: Routing) -> None:
        self._heat.count(routing.layer, routing.ids, routing.phase)

    def row_worth(self, layer: int) -> np.ndarray:
        return layer_worth(self._heat, layer)


class LeastRecentlyUsed:
    """Keeps what was used last."""

    name = "LRU"

    def __init__(self, header: TraceHeader) -> None:
        self._last = np.full((header.num_layers, header.num_experts), -1.0)

    def see(self, index: int, routing: Routing) -> None:
        self._last[routing.layer][routing.ids] = index

    def row_worth(self, layer: int) -> np.ndarray:
        return self._last[layer]


class LeastFrequentlyUsed:
    """Keeps what was used most often since the run began, in memory or not; of equals the last used."""

    name = "LFU"

    def __init__(self, header: TraceHeader) -> None:
        self._uses = np.zeros((header.num_layers, header.num_experts))
        self._recency = LeastRecentlyUsed(header)

    def see(self, index: int, routing: Routing) -> None:
        self._uses[routing.layer] += np.bincount(routing.ids.ravel(), minlength=self._uses.shape[1])
        self._recency.see(index, routing)

    def row_worth(self, layer: int) -> np.ndarray:
        return self._uses[layer] + self._recency.row_worth(layer) * 1e-9


class StaticHeat:
    """Keeps what was used most often in other runs, whatever this one does.

    Args:
        uses: [L, E].
    """

    name = "static heat"

    def __init__(self, uses: np.ndarray) -> None:
        self._uses = uses.astype(np.float64)

    def see(self, index: int, routing: Routing) -> None:
        pass

    def row_worth(self, layer: int) -> np.ndarray:
        return self._uses[layer]


class Clairvoyant:
    """Gives up what will be needed last: no policy reads less where all experts are equally large.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """

    name = "optimum"

    def __init__(self, trace: Trace) -> None:
        shape = (trace.header.num_layers, trace.header.num_experts)
        never = float(len(trace.routings))
        upcoming = np.full(shape, never)
        self._after: list[np.ndarray] = []  # of each pass, the next use of the experts it uses
        self._used = [np.unique(routing.ids) for routing in trace.routings]
        for index in range(len(trace.routings) - 1, -1, -1):
            row = upcoming[trace.routings[index].layer]
            self._after.append(row[self._used[index]])
            row[self._used[index]] = index
        self._after.reverse()
        self._worth = -upcoming

    def see(self, index: int, routing: Routing) -> None:
        self._worth[routing.layer][self._used[index]] = -self._after[index]

    def row_worth(self, layer: int) -> np.ndarray:
        return self._worth[layer]


@dataclass
class ReplayResult:
    """What a policy would have done.

    Attributes:
        policy: its name.
        capacity_bytes: memory for experts.
        hits, uses: distinct experts that passes found in memory, and that they needed.
        read_bytes: slabs read.
        num_hits, num_missed: the same pass by pass.
    """

    policy: str
    capacity_bytes: int
    hits: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    uses: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    read_bytes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    num_hits: list[int] = field(default_factory=list)
    num_missed: list[int] = field(default_factory=list)

    def hit_rate(self, phase: Phase | None = None) -> float:
        """Share of uses that were hits, in one phase or both; 1 when nothing was used."""
        phases = PHASES if phase is None else (phase,)
        uses = sum(self.uses[each] for each in phases)
        return sum(self.hits[each] for each in phases) / uses if uses else 1.0


def replay(
    trace: Trace,
    policy: Policy,
    capacity_bytes: int,
    resident: np.ndarray | None = None,
    elsewhere: np.ndarray | None = None,
) -> ReplayResult:
    """Run a trace through memory.

    Args:
        capacity_bytes: memory for experts, at least the largest slab's.
        resident: [L, E] bool, experts that memory begins with, which must fit; none when not given.
        elsewhere: [L, E] bool, experts that need no place in it, on a device or pinned apart; never counted.
    """
    header = trace.header
    layers = [layer for layer, nbytes in enumerate(header.slab_nbytes) if nbytes]
    assert capacity_bytes >= max(header.slab_nbytes), (capacity_bytes, header.slab_nbytes)
    ranking = Ranking(policy.row_worth, layers)
    is_here = np.zeros((header.num_layers, header.num_experts), bool)
    free_bytes = capacity_bytes
    if resident is not None:
        is_here |= resident
        free_bytes -= int(resident.sum(axis=1) @ np.array(header.slab_nbytes, np.int64))
        assert free_bytes >= 0, free_bytes
        for layer in layers:
            ranking.offer(layer, np.flatnonzero(resident[layer]))
    result = ReplayResult(policy.name, capacity_bytes)
    for index, routing in enumerate(trace.routings):
        layer, phase = routing.layer, routing.phase
        slab_nbytes = header.slab_nbytes[layer]
        policy.see(index, routing)
        ranking.update(layer)
        needed = np.unique(routing.ids)
        if elsewhere is not None:
            needed = needed[~elsewhere[layer][needed]]
        here = is_here[layer][needed]
        missing = needed[~here]
        result.uses[phase] += len(needed)
        result.hits[phase] += len(needed) - len(missing)
        result.read_bytes[phase] += len(missing) * slab_nbytes
        result.num_hits.append(len(needed) - len(missing))
        result.num_missed.append(len(missing))
        held = needed[here].tolist()
        ranking.withdraw(layer, held)
        for expert in missing.tolist():
            while free_bytes < slab_nbytes:
                given_up = ranking.give_up()
                if given_up is None:  # the pass holds all of memory: what it has computed with may go
                    ranking.offer(layer, held)
                    held = []
                    continue
                is_here[given_up] = False
                free_bytes += header.slab_nbytes[given_up[0]]
            free_bytes -= slab_nbytes
            is_here[layer, expert] = True
            held.append(expert)
        ranking.offer(layer, held)
    return result


def compare(trace: Trace, capacity_bytes: int, heat: Heat | None = None) -> list[ReplayResult]:
    """What ships beside plain policies and the optimum, the optimum last.

    Args:
        heat: what earlier runs learned, which both the shipped policy and static heat begin with; left unchanged.
    """
    header = trace.header
    own = Heat(header.num_layers, header.num_experts)
    if heat is not None:
        own.restore(heat.arrays())
        own.begin_run()
    policies: list[Policy] = [ByHeat(own), LeastRecentlyUsed(header), LeastFrequentlyUsed(header)]
    if heat is not None:
        policies.append(StaticHeat(sum(heat.uses.values())))
    policies.append(Clairvoyant(trace))
    return [replay(trace, policy, capacity_bytes) for policy in policies]


def learned(traces: list[Trace]) -> Heat:
    """The heat that runs leave behind for the next one.

    Args:
        traces: of one model, in the order of the runs; at least one.
    """
    header = traces[0].header
    heat = Heat(header.num_layers, header.num_experts)
    for trace in traces:
        for routing in trace.routings:
            heat.count(routing.layer, routing.ids, routing.phase)
    return heat
