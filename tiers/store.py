"""The only door to experts: `with store.lease(layer, ids, num_decode) as lease`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.slab import SlabLayout
from glm_gpu.tiers.counters import TierReport
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.lease import PoolLease
from glm_gpu.tiers.prefetch import PrefetchMode, PrefetchSwitch
from glm_gpu.tiers.promotion import Promotions, by_worth, hottest
from glm_gpu.tiers.reader import Urgency
from glm_gpu.tiers.residency import Residency
from glm_gpu.tiers.trace import TraceWriter

# A pass of more rows than this uses most experts of every layer: guessing which is pointless.
MAX_PREFETCH_ROWS = 8
# Passes between looks at which experts are hot, and at how much memory is in use.
REVIEW_PASSES = 16
GUARD_PASSES = 16


class Lease(Protocol):
    """Experts of one layer, held for one pass."""

    def parts(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The experts in the order they can be computed: first those in memory, then the others as they arrive.

        Yields:
            members: [n] int64, which of the leased ids these are.
            slabs: their n slabs; they neither move nor change until the next part is asked for.

        Raises:
            CheckpointError: an expert cannot be read. The store stays whole; the same lease may be tried again.
        """


class ExpertStore(Protocol):
    """What the model knows of experts: slabs, never where they lie."""

    def layout(self, layer: int) -> SlabLayout:
        """How the layer's slabs are laid out."""

    def begin_pass(self, phase: Phase) -> None:
        """Between two passes: experts may be moved now."""

    def lease(self, layer: int, ids: np.ndarray, num_decode: int) -> AbstractContextManager[Lease]:
        """Hold distinct experts, [U] int. What is not in memory begins to be read; never waits.

        Args:
            num_decode: the first so many were chosen by rows of answers, the others by rows of prompts alone.
        """

    def count(self, layer: int, choices: np.ndarray, num_decode: int) -> None:
        """Record which experts, [T, K], a pass's rows chose, of which the first `num_decode` are answers'."""

    def wants_prefetch(self, layer: int, num_rows: int) -> bool:
        """Whether a guess of the experts that `layer` will use is welcome, given the rows of the pass."""

    def prefetch(self, layer: int, ids: np.ndarray) -> None:
        """Begin to read distinct experts that a layer will probably use; never waits."""


class TieredStore:
    """Experts in a bounded number of slots, by heat; the rest on disk until they are asked for. A context manager.

    One pass at a time leases; reads run on threads of the store's own. Whatever the number of slots, down to one of a
    slab size, a pass gets the same bytes. When opened, the hottest experts are read in the background.

    Args:
        files: reads experts; closed with the store.
        num_slots: slots by slab size in bytes (`SlabLayout.aligned_nbytes`), at least one for each size in use.
        heat: what placement goes by; counted here.
        num_pinned: how many slots of each size hold hot experts that stay, fewer than there are slots.
        lock_bytes: so much of those is locked in memory.
        num_read_threads: reads in flight at once.
        prefetch: whether to read what the next layer will probably use.
        promote_bytes_s: bound on background reads.
        excess_bytes: tells how far this process is above its memory budget.
        trace: records every choice; closed with the store.
        is_elsewhere: [L, E] bool, experts that need no slot here because a faster tier, which keeps this, has them.
    """

    def __init__(
        self,
        files: ExpertFiles,
        num_slots: dict[int, int],
        heat: Heat,
        num_pinned: dict[int, int] | None = None,
        lock_bytes: int = 0,
        num_read_threads: int = 4,
        prefetch: PrefetchMode = "auto",
        promote_bytes_s: float = float("inf"),
        excess_bytes: Callable[[], int] = lambda: 0,
        trace: TraceWriter | None = None,
        is_elsewhere: np.ndarray | None = None,
    ) -> None:
        self.files, self._heat = files, heat
        self.switch = PrefetchSwitch(prefetch)
        self._promotions = Promotions(promote_bytes_s)
        self._is_elsewhere = is_elsewhere
        self._residency = Residency(
            files, heat, num_slots, num_read_threads, lock_bytes, self._promotion_ended, is_elsewhere
        )
        self.counters = self._residency.counters
        self._num_pinned = num_pinned or {}
        self._excess_bytes = excess_bytes
        self._trace = trace
        self._guesses: dict[int, np.ndarray] = {}
        self._wait_s_before = 0.0
        with self._residency.changed:
            self._review()

    def __enter__(self) -> "TieredStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading and close the files. No lease may be open."""
        self._residency.close()
        self.files.close()
        if self._trace is not None:
            self._trace.close()

    @property
    def heat(self) -> Heat:
        """What placement goes by, every choice so far counted."""
        with self._residency.changed:
            self._residency.settle()
            return self._heat

    def layout(self, layer: int) -> SlabLayout:
        return self.files.layout(layer)

    def count(self, layer: int, choices: np.ndarray, num_decode: int) -> None:
        with self._residency.changed:
            self._residency.count(layer, choices, num_decode)
        if self._trace is not None:
            self._trace.record(layer, choices, num_decode)
        guess = self._guesses.pop(layer, None)
        if guess is not None:
            used = np.unique(choices)
            self.counters.guessed += len(guess)
            self.counters.needed += len(used)
            self.counters.guessed_right += len(np.intersect1d(guess, used, assume_unique=True))

    def begin_pass(self, phase: Phase) -> None:
        residency = self._residency
        with residency.changed:
            residency.pass_number += 1
            waited = self._waited_s - self._wait_s_before
            self._wait_s_before = self._waited_s
            if phase == "decode":
                self.switch.step(waited)
            # where every expert has its slot, there is nothing to choose, and the choice would take a millisecond
            if residency.pass_number % REVIEW_PASSES == 0 and not residency.holds_every_expert:
                self._review()
            self._promote()
        if residency.pass_number % GUARD_PASSES == 0:
            excess = self._excess_bytes()
            if excess > 0:
                self.shrink(excess)

    def lease(self, layer: int, ids: np.ndarray, num_decode: int) -> PoolLease:
        return PoolLease(self._residency, layer, ids, num_decode)

    def wants_prefetch(self, layer: int, num_rows: int) -> bool:
        return (
            self.switch.is_on
            and num_rows <= MAX_PREFETCH_ROWS
            and layer in self.files.layers
            and not self._residency.pool(layer).holds_every_expert
        )

    def prefetch(self, layer: int, ids: np.ndarray) -> None:
        residency = self._residency
        with residency.changed:
            self._guesses[layer] = ids
            for expert in ids[residency.pool(layer).find(layer, ids) < 0].tolist():
                if not residency.has_room_in_flight or not residency.request(layer, expert, Urgency.PREFETCH):
                    return

    @property
    def _waited_s(self) -> float:
        """What prefetching is to save: the time that passes stood still so far."""
        return self.counters.wait_s

    def shrink(self, num_bytes: int) -> int:
        """Give memory back to the system, the coldest experts' first: how many bytes were given."""
        with self._residency.changed:
            return self._residency.shrink(num_bytes)

    def tier_map(self) -> dict[int, np.ndarray]:
        """For each layer, [E] uint8: 3 in a device's memory, 2 where an expert is pinned, 1 in memory, 0 on disk."""
        with self._residency.changed:
            return {layer: self._residency.pool(layer).places(layer) for layer in self.files.layers}

    def report(self) -> list[TierReport]:
        """The tiers as they stand: VRAM, locked RAM (hot experts that stay), RAM, and disk (everything else)."""
        places = self.tier_map()
        uses_by_phase = self.heat.uses.values()
        uses = {layer: sum(uses[layer] for uses in uses_by_phase) for layer in places}
        all_uses = max(1, sum(int(layer_uses.sum()) for layer_uses in uses.values()))
        pools, phases = self._residency.pools, self.counters.phases
        pinned_slots = sum(int(pool.pinned.sum()) * pool.slot_nbytes for pool in pools)
        all_slots = sum(pool.num_slots * pool.slot_nbytes for pool in pools)
        capacities = {"disk": 0, "ram": all_slots - pinned_slots, "locked": pinned_slots}
        if vram_slots := self._vram_slot_bytes():
            capacities["vram"] = vram_slots
        reports = []
        for code, (name, capacity_bytes) in enumerate(capacities.items()):
            members = {layer: place == code for layer, place in places.items()}
            used_bytes = sum(int(m.sum()) * self.layout(layer).nbytes for layer, m in members.items())
            share = sum(int(uses[layer][m].sum()) for layer, m in members.items()) / all_uses
            hits = {phase: getattr(counts, name, 0) for phase, counts in phases.items()}
            num_experts = sum(int(m.sum()) for m in members.values())
            reports.append(TierReport(name, num_experts, used_bytes, capacity_bytes or used_bytes, share, hits))
        return reports[::-1]

    def _vram_slot_bytes(self) -> int:
        """All slots in devices' memory."""
        return 0

    def _review(self) -> None:
        """Pin the experts that are hot now, and queue those that should be here."""
        residency, pinned = self._residency, set()
        for pool in residency.pools:
            num_pinned = min(self._num_pinned.get(pool.slot_nbytes, 0), pool.num_slots - 1)
            pinned |= hottest(self.heat, pool.layers, num_pinned, residency.pinned, self._is_elsewhere)
        residency.repin(pinned)
        has_free = any(pool.has_free for pool in residency.pools)
        wanted = by_worth(self.heat, self.files.layers, self._is_elsewhere) if has_free else sorted(pinned)
        self._promotions.want(wanted)
        self._promote()

    def _promote(self) -> None:
        """Begin background reads as far as their bounds allow."""
        residency = self._residency
        while self._promotions.may_begin():
            layer, expert = self._promotions.take()
            pool = residency.pool(layer)
            may_have_slot = pool.has_free or (layer, expert) in residency.pinned
            is_here = pool.find(layer, np.array([expert]))[0] >= 0
            if may_have_slot and not is_here and residency.request(layer, expert, Urgency.PROMOTE):
                self._promotions.begun(pool.slot_nbytes)

    def _promotion_ended(self) -> None:
        self._promotions.ended()
        self._promote()
