"""Experts that go up to a device before their layer asks for them, because its router was asked early."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from glm_gpu.device import Event
from glm_gpu.tiers.reader import Urgency
from glm_gpu.tiers.residency import Key, Residency
from glm_gpu.tiers.slots import SlotPool, SlotState
from glm_gpu.tiers.vram_tier import VramTier

# Of a device's slots of one size at most so many take copies that may be in vain: the rest is for what is wanted now.
MAX_SHARE = 0.25


@dataclass(frozen=True)
class _Copy:
    """One under way: its slot on the device, whether the host keeps it pinned, and its slab there, held meanwhile."""

    tier: VramTier
    slot: int
    is_pinned: bool
    arrival: Event
    hold: ExitStack


class CopiesAhead:
    """Copies that are under way from the host's slots to devices, until their layer or the end of the pass.

    Args:
        residency: the host's slots; its counters are kept.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency, self._counters = residency, residency.counters
        self._copies: dict[Key, _Copy] = {}

    def begin(self, tier: VramTier, layer: int, ids: np.ndarray) -> None:
        """Begin to bring up distinct experts that a layer will probably use; never waits.

        Called while the slots that queued work reads are leased. What the host has is copied into slots that are free
        or hold what is worth clearly less; what it has not is read from disk.
        """
        self._admit({key: copy for key, copy in self._copies.items() if copy.arrival.done})
        ids = ids[tier.pool(layer).find(layer, ids) < 0]
        if not len(ids):
            return
        residency, host = self._residency, self._residency.pool(layer)
        with residency.changed:
            residency.settle()
            tier.refresh()
            for expert, slot in zip(ids.tolist(), host.find(layer, ids).tolist(), strict=True):
                if slot < 0:
                    if residency.has_room_in_flight:
                        residency.request(layer, expert, Urgency.PREFETCH)
                elif host.state[slot] == SlotState.READY and not self._copy(tier, layer, expert, host, slot):
                    return

    def _copy(self, tier: VramTier, layer: int, expert: int, host: SlotPool, slot: int) -> bool:
        """Queue a copy; False when no slot on the device may be had for it."""
        pool = tier.pool(layer)
        num_under_way = sum(copy.tier.pool(other) is pool for (other, _), copy in self._copies.items())
        has_room = num_under_way + 1 <= MAX_SHARE * pool.num_slots
        target = tier.take(layer, above=tier.value(layer, expert)) if has_room else None
        if target is None:
            return False
        hold = ExitStack()
        hold.enter_context(self._residency.held(host, slot))
        tier.begin(layer, expert, host.slabs[slot], target)
        arrival = tier.device.copy.record()
        self._copies[layer, expert] = _Copy(tier, target, bool(host.pinned[slot]), arrival, hold)
        self._counters.copied_ahead += 1
        return True

    def claim(
        self, tier: VramTier, layer: int, ids: np.ndarray, num_decode: int
    ) -> tuple[list[int], list[tuple[Event, ExitStack]]]:
        """Those of a layer's experts that are on their way: kernels may find them behind their arrival.

        Args:
            ids: [U] distinct; the first `num_decode` were chosen by rows of answers.

        Returns:
            The experts, and for each when it has arrived and what is to be let go of then.
        """
        claimed, holds = [], []
        for place, expert in enumerate(ids.tolist()):
            if (layer, expert) not in self._copies:
                continue
            claimed.append(expert)
            counts = self._counters.phases["decode" if place < num_decode else "prefill"]
            copy = self._copies.pop((layer, expert))
            self._residency.unused_prefetches.discard((layer, expert))
            tier.admit(layer, expert, copy.slot)
            holds.append((copy.arrival, copy.hold))
            self._counters.ahead_used += 1
            self._counters.ahead_late += not copy.arrival.done
            # where it was when the pass began
            counts.locked += copy.is_pinned
            counts.ram += not copy.is_pinned
        return claimed, holds

    def settle(self) -> None:
        """Between passes: wait for copies that nobody claimed, and let kernels find them."""
        last = {copy.tier.device: copy.arrival for copy in self._copies.values()}  # a device's copies are in order
        for arrival in last.values():
            arrival.synchronize()
        self._admit(dict(self._copies))

    def _admit(self, arrived: dict[Key, _Copy]) -> None:
        """Let kernels of later passes find what nobody claimed."""
        for (layer, expert), copy in arrived.items():
            copy.tier.admit(layer, expert, copy.slot)
            copy.tier.unused.add((layer, expert))
            copy.hold.close()
            del self._copies[layer, expert]

    def count(self, tier: VramTier, layer: int, choices: np.ndarray) -> None:
        """Take note of what a pass chose in a layer."""
        if tier.unused:
            used = tier.unused & {(layer, expert) for expert in np.unique(choices).tolist()}
            tier.unused -= used
            self._counters.ahead_used += len(used)
