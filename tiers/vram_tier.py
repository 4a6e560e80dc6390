"""The VRAM of one device as a tier: the hottest experts of its layers, and room for others that a pass needs.

Every address that kernels read is in a table. Tables, slots, and copies change only at two kinds of moments: between
passes, and in a layer behind the host's one wait, for the router's choice. By then the compute stream has passed all
earlier layers, so their slots may be overwritten; slots that this layer's own work reads are guarded by events.
"""

from collections.abc import Iterator

import numpy as np

from glm_gpu.device import Arena, Device, Event, aligned
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.slab import SlabLayout
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.promotion import hottest
from glm_gpu.tiers.residency import HYSTERESIS, Key
from glm_gpu.tiers.vram import AddressTable, VramSlots

# Of a device's slots so many hold hot experts that a pass's misses cannot push out.
PINNED_SHARE = 0.25
# Tables of parts that may be under way at once; the next one waits for the first.
_NUM_PART_TABLES = 8


class VramTier:
    """See the module. All methods are called by the thread that runs passes.

    Args:
        layouts: of each sparse layer on the device.
        num_slots: by slot size in bytes, each at least 2.
        num_transit: how many of them are for transit.
        is_elsewhere: [L, E] bool, kept up to date: experts that have a slot here.

    Attributes:
        unused: experts copied ahead of their layer that no pass has used since.
        num_wasted: how many of those have been pushed out.
        table: addresses of experts in VRAM.
        reach: the same, and those of experts that kernels may read in pinned host memory.

    Raises:
        DeviceMemoryError: the device has not so much memory left.
    """

    def __init__(
        self,
        device: Device,
        layouts: dict[int, SlabLayout],
        num_slots: dict[int, int],
        num_transit: dict[int, int],
        heat: Heat,
        is_elsewhere: np.ndarray,
    ) -> None:
        self.device, self.layers, self._heat = device, list(layouts), heat
        self.unused: set[Key] = set()
        self.num_wasted = 0
        self._layouts = layouts
        num_experts = heat.shape[1]
        self.table = AddressTable(device, self.layers, num_experts)
        self.reach = AddressTable(device, self.layers, num_experts)
        self._is_elsewhere = is_elsewhere
        self._worth = np.zeros(heat.shape)
        self._stale = set(self.layers)
        self.refresh()
        self.pools: list[VramSlots] = []
        for size, count in num_slots.items():
            layers = [layer for layer, layout in layouts.items() if layout.aligned_nbytes == size]
            self.pools.append(VramSlots(device, count, num_transit[size], size, layers, num_experts))
        self._pool_of = {layer: pool for pool in self.pools for layer in pool.layers}
        self._parts = Arena(device, _NUM_PART_TABLES * aligned(8 * num_experts))
        self._part_views = [self._parts.take((num_experts,), "i64") for _ in range(_NUM_PART_TABLES)]
        self._part_rows = device.host_array((_NUM_PART_TABLES, num_experts), np.int64)
        self._part_events: list[Event | None] = [None] * _NUM_PART_TABLES
        self._num_parts = 0

    def close(self) -> None:
        """Give all slots back."""
        for pool in self.pools:
            pool.close()
        for table in (self.table, self.reach):
            table.close()
        self._parts.close()

    def pool(self, layer: int) -> VramSlots:
        """The slots that a layer's experts go to."""
        return self._pool_of[layer]

    def counted(self, layer: int) -> None:
        """The heat of a layer has changed; `refresh` works out what that changes here."""
        self._stale.add(layer)

    def refresh(self) -> None:
        """Take in what the heat has counted."""
        if self._stale:
            layers = np.array(sorted(self._stale))
            self._worth[layers] = worth(self._heat, layers)
            self._stale.clear()

    def put(self, layer: int, expert: int, slab: np.ndarray, slot: int) -> None:
        """Queue an expert's copy into a slot that `take` gave; kernels find it by the table from then on."""
        self.begin(layer, expert, slab, slot)
        self.admit(layer, expert, slot)

    def begin(self, layer: int, expert: int, slab: np.ndarray, slot: int) -> None:
        """Queue an expert's copy into a slot that `take` gave; nobody finds it, nor pushes it out, before `admit`."""
        pool = self._pool_of[layer]
        pool.place(slot, layer, expert)
        target = View(int(pool.addresses[slot]), (slab.nbytes,), "u8")
        self.device.load(target, slab, self.device.copy)

    def admit(self, layer: int, expert: int, slot: int) -> None:
        """Let kernels that are queued from now on find an expert whose copy was begun."""
        pool = self._pool_of[layer]
        address = int(pool.addresses[slot])
        pool.arrive(slot, 0)
        self.table.set(layer, expert, address)
        if slot not in pool.transit:
            self.reach.set(layer, expert, address)
            self._is_elsewhere[layer, expert] = True

    def value(self, layer: int, expert: int) -> float:
        """What an expert is worth, as `refresh` found it last."""
        return float(self._worth[layer, expert])

    def take(self, layer: int, above: float | None = None) -> int | None:
        """A slot for an expert of a layer, emptied if need be.

        Args:
            above: what the expert is worth if it may push out only what is clearly worth less; None if it must come in.

        Returns:
            None when every slot is leased, pinned, or worth keeping.
        """
        pool = self._pool_of[layer]
        slot = pool.take_free()
        if slot is not None:
            return slot
        slots = pool.evictable()
        if not len(slots):
            return None
        values = self._worth[pool.layer[slots], pool.expert[slots]]
        coldest = int(np.argmin(values))
        if above is not None and above <= values[coldest] * HYSTERESIS:
            return None
        self.drop(pool, int(slots[coldest]))
        return int(slots[coldest])

    def drop(self, pool: VramSlots, slot: int) -> None:
        """Forget a slot's expert; the caller owns the slot then."""
        layer, expert = int(pool.layer[slot]), int(pool.expert[slot])
        if (layer, expert) in self.unused:
            self.unused.discard((layer, expert))
            self.num_wasted += 1
        self.table.set(layer, expert, 0)
        if slot not in pool.transit:
            self.reach.set(layer, expert, 0)
            self._is_elsewhere[layer, expert] = False
        pool.clear(slot)

    def part_table(self, layer: int, experts: list[int]) -> tuple[View, int]:
        """A table with the addresses of these experts alone, its copy queued behind theirs; and which one it is."""
        index = self._num_parts % _NUM_PART_TABLES
        self._num_parts += 1
        if self._part_events[index] is not None:
            self._part_events[index].synchronize()
        row = self._part_rows[index]
        row[...] = 0
        row[experts] = [self.table.address(layer, expert) for expert in experts]
        self.device.load(self._part_views[index], row, self.device.copy)
        return self._part_views[index], index

    def computed(self, index: int, event: Event) -> None:
        """The work with a part's table has been queued; the table may be written once the event is reached."""
        self._part_events[index] = event

    def reached(self) -> None:
        """The host has waited for all work with tables of parts."""
        self._part_events = [None] * _NUM_PART_TABLES

    def review(self) -> None:
        """Pin the experts that are hot now, as far as they are here."""
        for pool in self.pools:
            pinned = {(int(pool.layer[s]), int(pool.expert[s])) for s in np.flatnonzero(pool.pinned)}
            wanted = hottest(self._heat, pool.layers, int(pool.num_slots * PINNED_SHARE), pinned)
            pool.pinned[:] = False
            for layer, expert in wanted:
                slot = int(pool.find(layer, np.array([expert]))[0])
                if slot >= 0 and slot not in pool.transit:
                    pool.pinned[slot] = True

    def promotable(self) -> Iterator[tuple[Key, float]]:
        """Experts that are not here, the most valuable first, with what they are worth."""
        rows = np.array(self.layers, np.intp)
        values = np.where(self._is_elsewhere[rows], -1.0, self._worth[rows])
        for n in np.argsort(-values, axis=None, kind="stable").tolist():
            row, expert = divmod(n, values.shape[1])
            if values[row, expert] < 0:
                return
            yield (self.layers[row], expert), float(values[row, expert])

    def expected_missed_bytes(self) -> float:
        """Bytes of the experts outside VRAM that a token is expected to use, by what the heat has counted."""
        outside = np.where(self._is_elsewhere[self.layers], 0.0, self._worth[self.layers])
        return float(outside.sum(axis=1) @ np.array([self._layouts[layer].nbytes for layer in self.layers]))

    def give_back(self, num_bytes: int) -> int:
        """Free so much of the device's memory for something else, a slot of each size staying: what was freed."""
        given = 0
        for pool in sorted(self.pools, key=lambda pool: -pool.num_slots * pool.slot_nbytes):
            while given < num_bytes and (slots := pool.block_to_give()) is not None and len(slots) < pool.num_slots:
                pool.pinned[slots.start : slots.stop] = False
                pool.take_all_free(slots)
                for slot in slots:
                    if pool.layer[slot] >= 0:
                        self.drop(pool, slot)
                given += pool.give(slots)
        return given
