"""Experts for a model on devices: the VRAM of each in front of the host's slots and the disk."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from glm_gpu.arrays import distinct
from glm_gpu.batch import Phase
from glm_gpu.device import Event
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.pinned import pin
from glm_gpu.tiers.ahead import CopiesAhead
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.link import LinkRates, reads_in_place
from glm_gpu.tiers.residency import Key
from glm_gpu.tiers.slots import SlotPool, SlotState
from glm_gpu.tiers.store import MAX_PREFETCH_ROWS, REVIEW_PASSES, TieredStore
from glm_gpu.tiers.vram_missing import MissingRun
from glm_gpu.tiers.vram_tier import VramTier

# Bytes that go up to a device at a step border: at 25 GB/s of PCIe 4 ten milliseconds, every 16 steps.
MOVE_BYTES = 256 << 20

Compute = Callable[[View], None]
_Mapped = tuple[VramTier, Key, SlotPool, int]  # whose kernels reach which expert in which slot of the host


class DeviceStore(TieredStore):
    """A `TieredStore` whose hottest experts are in devices' memory.

    Layers whose experts all have an address on their device need nothing from the host during a pass. In others the
    host waits once, for the router's choice; what is missing is copied on the copy stream while kernels compute with
    what is there. Behind them go up experts that the next layer will probably use, into free or colder slots. Whatever
    is where, kernels get the same bytes.

    Args:
        tiers: one a device; they and this store share `is_elsewhere`.
        links: of each device, None to copy whatever is used outside VRAM. Else a device's kernels read pinned host
            memory themselves in passes of few rows, if that is faster and every expert outside VRAM is there.
        files, num_slots, heat, options: as in TieredStore.
    """

    def __init__(
        self,
        files: ExpertFiles,
        num_slots: dict[int, int],
        heat: Heat,
        tiers: Sequence[VramTier],
        links: Sequence[LinkRates] | None = None,
        **options: Any,
    ) -> None:
        self.tiers, self._links = list(tiers), links
        self._tier_of = {layer: tier for tier in tiers for layer in tier.layers}
        self._deferred: list[tuple[Event, ExitStack]] = []
        self._mapped: list[_Mapped] = []
        self._choice_wait_s = 0.0
        self._fill(files, options.get("num_read_threads", 4))
        super().__init__(files, num_slots, heat, **options)
        self._ahead = CopiesAhead(self._residency)
        arrays = [pool.memory for pool in self._residency.pools]
        self._pinned = pin(self.tiers[0].device, arrays, sum(array.nbytes for array in arrays))

    def close(self) -> None:
        self._settle()
        super().close()
        for tier in self.tiers:
            tier.close()
        for each in self._pinned:
            each.close()

    def tier_of(self, layer: int) -> VramTier:
        """The device tier of a sparse layer."""
        return self._tier_of[layer]

    def begin_pass(self, phase: Phase) -> None:
        self._settle()
        super().begin_pass(phase)
        if self._residency.pass_number % REVIEW_PASSES == 0:
            with self._residency.changed:
                self._residency.settle()
            for tier in self.tiers:
                tier.refresh()
                tier.review()
                # An expert that gives way here would have to come from disk again, where now every one is at hand.
                if not all(tier.reach.is_complete(layer) for layer in tier.layers):
                    self._promote_to(tier)
        if self._links is not None:
            self._map()

    def count(self, layer: int, choices: np.ndarray, num_decode: int) -> None:
        super().count(layer, choices, num_decode)
        if layer in self._tier_of:
            tier = self._tier_of[layer]
            tier.counted(layer)
            self._ahead.count(tier, layer, choices)
            self.counters.ahead_wasted = sum(each.num_wasted for each in self.tiers)

    def wait_for(self, choice: Event) -> None:
        """Wait for a layer's choice: for copies too, since kernels wait for them."""
        began = time.perf_counter()
        choice.synchronize()
        self._choice_wait_s += time.perf_counter() - began

    @property
    def _waited_s(self) -> float:
        return self.counters.wait_s + self._choice_wait_s

    def wants_prefetch(self, layer: int, num_rows: int) -> bool:
        return self.switch.is_on and num_rows <= MAX_PREFETCH_ROWS and not self._tier_of[layer].table.is_complete(layer)

    def prefetch(self, layer: int, ids: np.ndarray) -> None:
        """Begin to bring up distinct experts that a layer will probably use; see `CopiesAhead.begin`."""
        self._guesses[layer] = ids
        self._ahead.begin(self._tier_of[layer], layer, ids)

    def count_resident(self, layer: int, choices: np.ndarray, num_decode: int) -> None:
        """Record the choices of a layer whose experts all had addresses; of the first `num_decode` rows are answers."""
        self.count(layer, choices, num_decode)
        ids, split = distinct(choices, num_decode, self.files.num_experts)
        for phase, part in (("decode", ids[:split]), ("prefill", ids[split:])):
            num_mapped = int((~self._is_elsewhere[layer, part]).sum())
            self.counters.phases[phase].vram += len(part) - num_mapped
            self.counters.phases[phase].locked += num_mapped

    def compute_missing(
        self,
        layer: int,
        choices: np.ndarray,
        num_decode: int,
        compute: Compute,
        guess: tuple[int, np.ndarray] | None = None,
    ) -> None:
        """Have experts computed that the layer's table did not show: for each part a table, as soon as it is there.

        Called behind the wait for the choice, when the work with the table has been queued.

        Args:
            choices: [T, K] int32.
            num_decode: the first so many rows are of answers.
            compute: queues the experts of a table.
            guess: the next layer and distinct experts that it will probably use.

        Raises:
            CheckpointError: an expert cannot be read.
        """
        self._release_deferred()  # the wait for the choice has covered them
        self.count(layer, choices, num_decode)
        tier = self._tier_of[layer]
        ids, split = distinct(choices, num_decode, self.files.num_experts)
        tier.reached()
        pool = tier.pool(layer)
        is_here = np.array([tier.table.address(layer, int(expert)) != 0 for expert in ids])
        self.counters.phases["decode"].vram += int(is_here[:split].sum())
        self.counters.phases["prefill"].vram += int(is_here[split:].sum())
        held = pool.find(layer, ids[is_here]).tolist()
        pool.leases[held] += 1
        try:
            if not is_here.all():
                num_decode_left = split - int(is_here[:split].sum())
                self._compute_others(tier, layer, ids[~is_here], num_decode_left, compute, held, len(choices))
            if guess is not None:
                self.prefetch(*guess)
        finally:
            pool.leases[:] = 0

    def _compute_others(
        self,
        tier: VramTier,
        layer: int,
        ids: np.ndarray,
        num_decode: int,
        compute: Compute,
        held: list[int],
        num_rows: int,
    ) -> None:
        """Have experts computed that were not in the table: first those on their way already, then those missing."""
        with self._residency.changed:
            self._residency.settle()
        tier.refresh()
        run = MissingRun(tier, layer, held, num_rows)
        claimed, holds = self._ahead.claim(tier, layer, ids, num_decode)
        if claimed:
            self._deferred += holds
            run.claim(claimed)
            compute(run.table())
            run.finish()
        is_missing = ~np.isin(ids, claimed)
        if is_missing.any():
            num_decode_left = int(is_missing[:num_decode].sum())
            with closing(self._arrivals(tier, layer, ids[is_missing], num_decode_left, run)) as parts:
                for part in parts:
                    compute(part)

    def _arrivals(
        self, tier: VramTier, layer: int, missing: np.ndarray, num_decode: int, run: MissingRun
    ) -> Iterator[View]:
        """Tables of experts whose copies are queued before whatever is queued on the compute stream next."""
        stack = ExitStack()
        lease = stack.enter_context(self.lease(layer, missing, num_decode))
        num_left = len(missing)
        with stack:
            try:
                for members, slabs in lease.parts():
                    num_left -= len(members)
                    experts = missing[members].tolist()
                    done = 0
                    while done < len(experts):
                        chunk = run.place(experts[done:], slabs[done:])
                        done += len(chunk)
                        table = run.table()
                        arrived = tier.device.copy.record()
                        yield table
                        run.finish()
                    if num_left:
                        arrived.synchronize()  # before the next part is asked for, which may overwrite these slabs
            except BaseException:
                tier.device.copy.synchronize()  # the slabs that are on their way are let go of now
                raise
            self._deferred.append((arrived, stack.pop_all()))

    def tier_map(self) -> dict[int, np.ndarray]:
        codes = super().tier_map()
        for layer, places in codes.items():
            places[self._is_elsewhere[layer]] = 3
        return codes

    def _vram_slot_bytes(self) -> int:
        return sum(pool.num_slots * pool.slot_nbytes for tier in self.tiers for pool in tier.pools)

    def is_reachable(self) -> bool:
        """Whether kernels can reach every expert of every layer: a pass of few rows then needs nothing from here."""
        return all(tier.reach.is_complete(layer) for tier in self.tiers for layer in tier.layers)

    def give_back(self, num_bytes: int) -> int:
        """Free memory of the devices by emptying slots, between passes: how many bytes."""
        self._settle()
        return sum(tier.give_back(num_bytes) for tier in self.tiers)

    def _settle(self) -> None:
        """Wait for copies under way and let go of the slabs that they read."""
        self._ahead.settle()
        for event, _ in self._deferred:
            event.synchronize()
        self._release_deferred()

    def _release_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for _, stack in deferred:
            stack.close()

    def _map(self) -> None:
        """Let kernels reach experts in pinned host memory, if that pays and completes every layer.

        Those stay where they are while all is complete, and no longer: without one that is nowhere in memory, their
        slots are wanted for others.
        """
        if self._mapped and not self.is_reachable():
            with self._residency.changed:
                for tier, (layer, expert), pool, slot in self._mapped:
                    pool.leases[slot] -= 1
                    if not self._is_elsewhere[layer, expert]:
                        tier.reach.set(layer, expert, 0)
            self._mapped = []
        num_ready = sum(int((pool.state == SlotState.READY).sum()) for pool in self._residency.pools)
        if num_ready + int(self._is_elsewhere.sum()) < len(self.files.layers) * self.files.num_experts:
            return
        with self._residency.changed:
            found: list[_Mapped] = []
            for tier, link in zip(self.tiers, self._links, strict=True):
                rest = self._rest(tier)
                if rest is None:
                    return
                if rest and not reads_in_place(link, tier.expected_missed_bytes(), len(tier.layers)):
                    return
                found += rest
            for tier, (layer, expert), pool, slot in found:
                pool.leases[slot] += 1
                tier.reach.set(layer, expert, tier.device.mapped_address(pool.slabs[slot]))
            self._mapped += found

    def _rest(self, tier: VramTier) -> "list[_Mapped] | None":
        """Experts that kernels cannot reach yet, in pinned host memory; None if one is not there."""
        found: list[_Mapped] = []
        for layer in tier.layers:
            if tier.reach.is_complete(layer):
                continue
            pool = self._residency.pool(layer)
            limit = self._pinned[self._residency.pools.index(pool)].num_bytes
            missing = [e for e in range(self.files.num_experts) if tier.reach.address(layer, e) == 0]
            for expert, slot in zip(missing, pool.find(layer, np.array(missing, np.intp)).tolist(), strict=True):
                is_pinned = (slot + 1) * pool.slot_nbytes <= limit
                if slot < 0 or pool.state[slot] != SlotState.READY or not is_pinned:
                    return None
                found.append((tier, (layer, expert), pool, slot))
        return found

    def _promote_to(self, tier: VramTier) -> None:
        """Copy experts that are worth it from the host's memory, a bounded number of bytes."""
        left = MOVE_BYTES
        for (layer, expert), value in tier.promotable():
            pool, host = tier.pool(layer), self._residency.pool(layer)
            with self._residency.changed:
                slot = int(host.find(layer, np.array([expert]))[0])
                is_passing = pool.find(layer, np.array([expert]))[0] >= 0
                if slot < 0 or host.state[slot] != SlotState.READY or is_passing:
                    continue
                target = tier.take(layer, above=value)
                left -= pool.slot_nbytes
                if target is None or left < 0:
                    if target is not None:
                        pool.give_back(target)
                    return
                stack = ExitStack()
                stack.enter_context(self._residency.held(host, slot))
            tier.put(layer, expert, host.slabs[slot], target)
            arrived = tier.device.copy.record()
            tier.device.compute.wait(arrived)
            self._deferred.append((arrived, stack))

    def _fill(self, files: ExpertFiles, num_threads: int) -> None:
        """Read the hottest experts into free slots, several at once."""
        for tier in self.tiers:
            keys: list[tuple[Key, int]] = []
            for (layer, expert), _ in tier.promotable():
                slot = tier.pool(layer).take_free()
                if slot is not None:
                    keys.append(((layer, expert), slot))

            def read(job: tuple[Key, int]) -> np.ndarray:
                (layer, expert), _ = job
                slab = np.empty(files.layout(layer).aligned_nbytes, np.uint8)
                files.read(layer, expert, slab)
                return slab[: files.layout(layer).nbytes]

            with ThreadPoolExecutor(num_threads, thread_name_prefix="glm-gpu-fill") as pool:
                for start in range(0, len(keys), 2 * num_threads):
                    jobs = keys[start : start + 2 * num_threads]
                    slabs = list(pool.map(read, jobs))
                    for ((layer, expert), slot), slab in zip(jobs, slabs, strict=True):
                        tier.put(layer, expert, slab, slot)
                    tier.device.copy.synchronize()
