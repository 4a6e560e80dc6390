"""Which experts are in memory and which are on their way: slots, reads, and what gives way to what."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from glm_gpu.tiers.counters import Counters
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.reader import ReadJob, ReadPool, Urgency
from glm_gpu.tiers.slots import SlotPool, SlotState

# An expert replaces another ahead of its use only if it is worth this many times more, or the two would take turns.
HYSTERESIS = 1.25

Key = tuple[int, int]  # (layer, expert)

log = logging.getLogger(__name__)


class Residency:
    """The slots of a store and the reads that fill them.

    Every method but `close` is called with `changed` held; reading threads take it themselves when a read ends, and
    notify it.

    Args:
        num_slots: by slab size in bytes.
        num_read_threads: reads in flight at once.
        lock_bytes: so much of the pinned slots is locked in memory.
        on_promoted: called, with `changed` held, when a background read has ended.
        is_elsewhere: [L, E] bool, experts that are in a faster tier and worth nothing here; kept by that tier.

    Attributes:
        changed: the lock of everything here, and the condition that a read has ended.
        pools: the slots, one pool for each slab size.
        pinned: experts to keep once they are here.
        jobs: reads under way or queued.
        failures: what the last read of an expert raised, until it is read again.
        unused_prefetches: experts read ahead that no pass has used yet.
    """

    def __init__(
        self,
        files: ExpertFiles,
        heat: Heat,
        num_slots: dict[int, int],
        num_read_threads: int,
        lock_bytes: int,
        on_promoted: Callable[[], None],
        is_elsewhere: np.ndarray | None = None,
    ) -> None:
        self.counters = Counters()
        self.changed = threading.Condition()
        sizes = layers_by_size(files)
        self.pools = [
            SlotPool(num_slots[size], size, files.layout(layers[0]).nbytes, layers, files.num_experts)
            for size, layers in sizes.items()
        ]
        self.pinned: set[Key] = set()
        self.jobs: dict[Key, ReadJob] = {}
        self.failures: dict[Key, Exception] = {}
        self.unused_prefetches: set[Key] = set()
        self.pass_number = 0
        self._max_in_flight = 2 * num_read_threads
        self._files, self._heat = files, heat
        self._is_elsewhere = is_elsewhere
        self._worth = worth(heat)  # [L, E], up to date but for the stale layers
        self._stale: set[int] = set()
        self._uncounted: dict[int, np.ndarray] = {}  # a pass's choices by layer, counted together
        self._uncounted_kind: tuple[tuple[int, ...], int] = ((), 0)  # their shape, and how many rows are answers'
        self._pool_of = {layer: pool for pool in self.pools for layer in pool.layers}
        self._lock_bytes = lock_bytes
        self._on_promoted = on_promoted
        self._reader: ReadPool | None = ReadPool(num_read_threads, self._read, self._finish)

    def close(self) -> None:
        """Wait for the reads under way and drop the others. Harmless when repeated."""
        if self._reader is not None:
            self._reader.close()
        # Callbacks tie threads, slots and store into a ring that would keep the slots until the next collection.
        self._reader = self._on_promoted = None

    def pool(self, layer: int) -> SlotPool:
        """The slots that a layer's experts go to."""
        return self._pool_of[layer]

    @property
    def holds_every_expert(self) -> bool:
        """Whether every expert has a slot, or is on its way to one; nothing then gives way to anything."""
        return all(pool.holds_every_expert for pool in self.pools)

    @property
    def has_room_in_flight(self) -> bool:
        """Whether another read may be queued. More at once would only empty slots before their time."""
        return len(self.jobs) < self._max_in_flight

    def count(self, layer: int, choices: np.ndarray, num_decode: int) -> None:
        """Record what a pass's rows chose in a layer, [T, K], at the latest when `settle` is called.

        What it changes in the experts' worth is worked out when a slot has to be emptied.

        Args:
            num_decode: the first so many rows are of answers.
        """
        kind = choices.shape, num_decode
        if layer in self._uncounted or kind != self._uncounted_kind:
            self.settle()
        self._uncounted[layer], self._uncounted_kind = choices, kind

    def settle(self) -> None:
        """Bring the heat up to date with what was counted."""
        if self._uncounted:
            layers, choices = np.array(list(self._uncounted)), np.stack(list(self._uncounted.values()))
            self._heat.count_layers(layers, choices, self._uncounted_kind[1])
            self._stale.update(self._uncounted)
            self._uncounted.clear()

    def request(self, layer: int, expert: int, urgency: Urgency) -> bool:
        """Have an expert read that has no slot; False when no slot may be had for it."""
        pool = self._pool_of[layer]
        slot = self._slot_for(pool, None if urgency == Urgency.DEMAND else (layer, expert))
        if slot is None:
            return False
        pool.place(slot, layer, expert)
        job = self.jobs[layer, expert] = ReadJob(layer, expert, slot, urgency)
        self.failures.pop((layer, expert), None)
        if urgency == Urgency.PREFETCH:
            self.unused_prefetches.add((layer, expert))
        self._reader.submit(job)
        return True

    @contextmanager
    def held(self, pool: SlotPool, slot: int) -> Iterator[None]:
        """Keep a READY slot as it is. Entered with `changed` held, left with or without."""
        pool.leases[slot] += 1
        try:
            yield
        finally:
            with self.changed:
                pool.leases[slot] -= 1

    def hasten(self, job: ReadJob) -> None:
        """A pass now waits for a read that was begun ahead of it."""
        if job.urgency != Urgency.DEMAND:
            job.urgency = Urgency.DEMAND
            self._reader.submit(job)

    def repin(self, pinned: set[Key]) -> None:
        """Keep these experts from now on, and no others; those that are not here are pinned when they arrive."""
        for layer, expert in self.pinned - pinned:
            slot = self._slot_of(layer, expert)
            if slot >= 0 and self._pool_of[layer].pinned[slot]:
                self._lock_bytes += self._pool_of[layer].unpin(slot)
        self.pinned = pinned
        for layer, expert in pinned:
            slot = self._slot_of(layer, expert)
            if slot >= 0:
                self._pin_if_ready(self._pool_of[layer], slot)

    def shrink(self, num_bytes: int) -> int:
        """Give memory back to the system, the coldest experts' first: how many bytes were given.

        Slots that are leased, pinned, or being filled stay, and so does one slot of each size.
        """
        given = 0
        for pool in sorted(self.pools, key=lambda pool: -pool.num_slots * pool.slot_nbytes):
            while given < num_bytes and pool.num_slots > 1:
                slot = self._slot_for(pool)
                if slot is None:
                    break
                pool.retire(slot)
                given += pool.slot_nbytes
        return given

    def _slot_of(self, layer: int, expert: int) -> int:
        return int(self._pool_of[layer].find(layer, np.array([expert]))[0])

    def _slot_for(self, pool: SlotPool, candidate: Key | None = None) -> int | None:
        """An empty slot, emptied if need be; None when all are held, or hold what is worth more than the candidate."""
        slot = pool.take_free()
        if slot is not None:
            return slot
        evictable = pool.evictable()
        if not len(evictable):
            return None
        self.settle()
        if self._stale:
            layers = np.array(sorted(self._stale))
            self._worth[layers] = worth(self._heat, layers)
            if self._is_elsewhere is not None:
                self._worth[layers] *= ~self._is_elsewhere[layers]
            self._stale.clear()
        values = self._worth[pool.layer[evictable], pool.expert[evictable]]
        coldest = int(np.argmin(values))
        if candidate is not None and self._worth[candidate] <= values[coldest] * HYSTERESIS:
            return None
        slot = int(evictable[coldest])
        key = (int(pool.layer[slot]), int(pool.expert[slot]))
        if key in self.unused_prefetches:
            self.unused_prefetches.discard(key)
            self.counters.wasted += 1
        self.counters.evictions += 1
        pool.clear(slot)
        return slot

    def _pin_if_ready(self, pool: SlotPool, slot: int) -> None:
        if pool.state[slot] != SlotState.READY or pool.pinned[slot]:
            return
        may_lock = pool.slot_nbytes <= self._lock_bytes
        if pool.pin(slot, may_lock):
            self._lock_bytes -= pool.slot_nbytes
        elif may_lock:
            self._lock_bytes = 0
            log.warning("hot experts cannot be locked in memory; raise the limit with `ulimit -l` or LimitMEMLOCK")

    def _read(self, job: ReadJob) -> None:
        began = time.perf_counter()
        self._files.read(job.layer, job.expert, self._pool_of[job.layer].slots[job.slot])
        with self.changed:
            self.counters.read_s += time.perf_counter() - began

    def _finish(self, job: ReadJob, failure: Exception | None) -> None:
        key, pool = (job.layer, job.expert), self._pool_of[job.layer]
        with self.changed:
            del self.jobs[key]
            if failure is None:
                pool.arrive(job.slot, self.pass_number)
                if key in self.pinned:
                    self._pin_if_ready(pool, job.slot)
            else:
                pool.clear(job.slot)
                pool.give_back(job.slot)
                self.unused_prefetches.discard(key)
                self.failures[key] = failure
                self.counters.read_errors += 1
            if job.is_promotion:
                self.counters.promotions += failure is None
                self._on_promoted()
            self.changed.notify_all()


def slots_for_all(files: ExpertFiles) -> dict[int, int]:
    """A slot for every expert, by slab size."""
    return {size: len(layers) * files.num_experts for size, layers in layers_by_size(files).items()}


def layers_by_size(files: ExpertFiles) -> dict[int, list[int]]:
    """The sparse layers by the bytes that a slot for their slabs takes."""
    sizes: dict[int, list[int]] = {}
    for layer in files.layers:
        sizes.setdefault(files.layout(layer).aligned_nbytes, []).append(layer)
    return sizes
