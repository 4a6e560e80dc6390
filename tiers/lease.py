"""A lease: one layer's experts, held while a pass computes with them."""

import time
from collections.abc import Iterator

import numpy as np

from glm_gpu.tiers.counters import PhaseCounters
from glm_gpu.tiers.reader import Urgency
from glm_gpu.tiers.residency import Residency
from glm_gpu.tiers.slots import SlotState


class PoolLease:
    """Distinct experts of one layer, handed out as they are there. See `glm_gpu.tiers.store.Lease`.

    Args:
        ids: [U] int, distinct.
        num_decode: the first so many were chosen by rows of answers.
    """

    def __init__(self, residency: Residency, layer: int, ids: np.ndarray, num_decode: int) -> None:
        self._residency, self._pool, self._layer = residency, residency.pool(layer), layer
        self._held: list[int] = []
        self._held_at_once: np.ndarray | None = None  # the same slots, when all were there
        self._pending: dict[int, int] = {}  # expert -> its place in ids, in the order asked
        phases = residency.counters.phases
        with residency.changed:
            slots = self._pool.find(layer, ids)
            if not residency.unused_prefetches and self._pool.are_ready(slots):
                self._hold_all(slots)
                self._count_hits(slots[:num_decode], phases["decode"])
                self._count_hits(slots[num_decode:], phases["prefill"])
                return
            self._resident = []
            for member, (expert, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
                self._classify(expert, slot, phases["decode" if member < num_decode else "prefill"])
                if slot >= 0 and self._pool.state[slot] == SlotState.READY:
                    self._resident.append(member)
                    self._hold(slot)
                else:
                    self._pending[expert] = member
                    residency.failures.pop((layer, expert), None)  # an old failure is no reason not to try again
            self._request_pending()

    def __enter__(self) -> "PoolLease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def parts(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Groups of experts that can be computed now; waits when there are none. See `Lease`."""
        slabs = self._pool.slabs
        if len(self._resident):
            yield np.asarray(self._resident), [slabs[slot] for slot in self._held]
        while self._pending:
            with self._residency.changed:
                self._drop()
                members = self._await_arrivals()
            yield np.array(members), [slabs[slot] for slot in self._held]

    def release(self) -> None:
        """Let go of whatever is still held. Harmless when repeated."""
        with self._residency.changed:
            self._drop()

    def _await_arrivals(self) -> list[int]:
        """Hold what has arrived, at least one expert; its members."""
        residency, layer, began = self._residency, self._layer, time.perf_counter()
        while True:
            experts = list(self._pending)
            slots = self._pool.find(layer, np.array(experts)).tolist()
            members = []
            for expert, slot in zip(experts, slots, strict=True):
                if slot >= 0 and self._pool.state[slot] == SlotState.READY:
                    self._hold(slot)
                    members.append(self._pending.pop(expert))
                elif (layer, expert) in residency.failures:
                    raise residency.failures.pop((layer, expert))
            self._request_pending()
            if members:
                residency.counters.wait_s += time.perf_counter() - began
                return members
            residency.changed.wait()

    def _request_pending(self) -> None:
        residency = self._residency
        for expert in self._pending:
            job = residency.jobs.get((self._layer, expert))
            if job is not None:
                residency.hasten(job)
            elif not residency.has_room_in_flight or not residency.request(self._layer, expert, Urgency.DEMAND):
                return

    def _classify(self, expert: int, slot: int, counters: PhaseCounters) -> None:
        """Count where an expert was when the pass began."""
        residency, key = self._residency, (self._layer, expert)
        is_ahead = key in residency.unused_prefetches
        residency.unused_prefetches.discard(key)
        if slot < 0:
            counters.missed += 1
        elif self._pool.state[slot] != SlotState.READY:
            counters.late += 1
        elif is_ahead and self._pool.loaded_pass[slot] == residency.pass_number:
            counters.prefetched += 1
        elif self._pool.pinned[slot]:
            counters.locked += 1
        else:
            counters.ram += 1

    def _hold_all(self, slots: np.ndarray) -> None:
        """The common case, every expert there and none just prefetched, without a look at each."""
        self._resident = np.arange(len(slots))
        self._pool.leases[slots] += 1
        self._held_at_once = slots
        self._held = slots.tolist()

    def _count_hits(self, slots: np.ndarray, counters: PhaseCounters) -> None:
        if len(slots):
            num_locked = int(self._pool.pinned[slots].sum())
            counters.locked += num_locked
            counters.ram += len(slots) - num_locked

    def _hold(self, slot: int) -> None:
        self._pool.leases[slot] += 1
        self._held.append(slot)

    def _drop(self) -> None:
        if self._held_at_once is not None:
            self._pool.leases[self._held_at_once] -= 1
            self._held_at_once = None
        else:
            for slot in self._held:
                self._pool.leases[slot] -= 1
        self._held.clear()
