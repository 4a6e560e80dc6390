"""Slots for the experts of one layer that are not in VRAM when a pass comes to it."""

import numpy as np

from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.tiers.store import MAX_PREFETCH_ROWS
from glm_gpu.tiers.vram_tier import VramTier


class MissingRun:
    """Where the experts of one layer go that its table does not show, in one pass, a part at a time.

    Args:
        held: slots that the layer's resident experts are in; they may be reused when they have been computed with.
    """

    def __init__(self, tier: VramTier, layer: int, held: list[int], num_rows: int) -> None:
        self._tier, self._layer, self._pool = tier, layer, tier.pool(layer)
        self._used: list[int] = []  # taken here and computed with, the first again the first
        self._current: list[int] = []  # slots of the part under way, and its experts
        self._experts: list[int] = []
        self._table = 0
        resident = tier.device.compute.record()
        self._event_of = dict.fromkeys(held, resident)
        self._held = held
        self._is_bulk = num_rows > MAX_PREFETCH_ROWS and len(self._pool.transit) > 1
        self._transit = sorted(self._pool.transit)
        self._most = len(self._transit) if self._is_bulk else self._pool.num_slots

    def place(self, experts: list[int], slabs: list[np.ndarray]) -> list[int]:
        """Queue copies of the first experts, as many as there are slots for at once, at least one: which."""
        chunk_size = max(1, self._most // 2)
        for expert, slab in zip(experts[:chunk_size], slabs, strict=False):
            slot = self._slot()
            if slot is None:
                break
            event = self._event_of.pop(slot, None)
            if event is not None:
                self._tier.device.copy.wait(event)
            self._tier.put(self._layer, expert, slab, slot)
            self._pool.leases[slot] += 1
            self._current.append(slot)
        assert self._current, "a pass has no slot to compute with"
        self._experts = experts[: len(self._current)]
        return self._experts

    def claim(self, experts: list[int]) -> None:
        """Experts whose copies were begun ahead are the next part."""
        self._current = self._pool.find(self._layer, np.array(experts)).tolist()
        self._pool.leases[self._current] += 1
        self._experts = experts

    def table(self) -> View:
        """A table of this part, whose copies come before whatever is queued on the compute stream next."""
        device = self._tier.device
        table, self._table = self._tier.part_table(self._layer, self._experts)
        device.compute.wait(device.copy.record())
        return table

    def finish(self) -> None:
        """The part has been queued for computing: its slots may be filled again behind that."""
        event = self._tier.device.compute.record()
        self._tier.computed(self._table, event)
        self._event_of |= dict.fromkeys(self._current, event)
        self._used += self._current
        self._current = []

    def _slot(self) -> int | None:
        """A slot to fill next, emptied if need be; None when what there is has to be computed with first."""
        if not self._is_bulk and (slot := self._tier.take(self._layer)) is not None:
            return slot
        if self._transit and (self._is_bulk or not self._used):
            return self._emptied(self._transit.pop())
        if self._used:
            return self._emptied(self._used.pop(0))
        if self._held and not self._current and not self._is_bulk:
            return self._emptied(self._held.pop())
        return None

    def _emptied(self, slot: int) -> int:
        """A slot whose expert, if any, has been computed with as far as this layer needs it."""
        self._pool.leases[slot] = 0
        self._pool.pinned[slot] = False
        if self._pool.layer[slot] >= 0:
            self._tier.drop(self._pool, slot)
        return slot
