"""Slots: fixed places for slabs of one size, in one arena, and who is in which."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

# Slots of at least this size are worth huge pages: single products at GLM-5.2's sizes gained 4 to 6 points of memory
# bandwidth (Xeon with AVX-512, 2 threads).
HUGE_PAGE_BYTES = 2 << 20


class SlotState:
    """EMPTY: nothing of use. IN_FLIGHT: being filled. READY: holds its expert. RETIRED: given back to the system.

    Plain numbers: an enum's members cost a function call each, and leases look at them for every expert.
    """

    EMPTY = 0
    IN_FLIGHT = 1
    READY = 2
    RETIRED = 3


def slot_memory(num_bytes: int, slot_nbytes: int) -> mmap.mmap:
    """Memory for slots, no page of it committed.

    A private anonymous mapping: page-aligned for direct reads, and pages that are given back are gone. A shared one,
    the default, would count as shared memory and stay.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slot_nbytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # kernels without huge pages run a few percent slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class SlotTable:
    """Who is in which slot, for all layers whose slabs have one size; the memory itself is the subclasses'.

    A slot is free when EMPTY; a READY slot may be given to another expert when it has no lease and is not pinned.

    Args:
        num_slots: how many there are.
        slot_nbytes: of one slot.
        layers: the layers whose experts may come here.
        num_experts: E.

    Attributes:
        num_slots: those that are not retired.
        state, layer, expert, leases, pinned: [slots] arrays, a slot's condition.
        loaded_pass: [slots] int64, the pass during which it was read.
    """

    def __init__(self, num_slots: int, slot_nbytes: int, layers: Sequence[int], num_experts: int) -> None:
        self.num_slots, self.slot_nbytes, self.layers = num_slots, slot_nbytes, list(layers)
        self.state = np.zeros(num_slots, np.uint8)
        self.layer = np.full(num_slots, -1, np.int32)
        self.expert = np.full(num_slots, -1, np.int32)
        self.leases = np.zeros(num_slots, np.int32)
        self.pinned = np.zeros(num_slots, bool)
        self.loaded_pass = np.zeros(num_slots, np.int64)
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of = {layer: np.full(num_experts, -1, np.int32) for layer in layers}

    @property
    def holds_every_expert(self) -> bool:
        """Whether every expert of the pool's layers has a slot, so that nothing will ever be read again."""
        return self.num_slots - len(self._free) == sum(len(slots) for slots in self._slot_of.values())

    @property
    def has_free(self) -> bool:
        """Whether `take_free` would give a slot."""
        return bool(self._free)

    def places(self, layer: int) -> np.ndarray:
        """[E] uint8: 2 where an expert is pinned, 1 where it is in memory, 0 elsewhere."""
        slots = self._slot_of[layer]
        is_ready = (slots >= 0) & (self.state[slots] == SlotState.READY)
        return is_ready * (1 + self.pinned[slots]).astype(np.uint8)

    def find(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The slots of experts, READY or IN_FLIGHT; -1 where they have none. [n] int32."""
        return self._slot_of[layer][ids]

    def are_ready(self, slots: np.ndarray) -> bool:
        """Whether every expert of which `find` told the slot can be used."""
        return bool(slots.min() >= 0 and (self.state[slots] == SlotState.READY).all())

    def place(self, slot: int, layer: int, expert: int) -> None:
        """Give an EMPTY slot, just taken, to an expert that is about to be read."""
        assert self.state[slot] == SlotState.EMPTY and self._slot_of[layer][expert] < 0
        self.state[slot] = SlotState.IN_FLIGHT
        self.layer[slot], self.expert[slot] = layer, expert
        self._slot_of[layer][expert] = slot

    def arrive(self, slot: int, pass_number: int) -> None:
        """A slot's expert has been read, during a pass."""
        self.state[slot] = SlotState.READY
        self.loaded_pass[slot] = pass_number

    def take_free(self) -> int | None:
        """An EMPTY slot, no longer in the list of free ones; None when there is none."""
        return self._free.pop() if self._free else None

    def evictable(self) -> np.ndarray:
        """Slots whose expert may be dropped: [n] int64."""
        return np.flatnonzero((self.state == SlotState.READY) & (self.leases == 0) & ~self.pinned)

    def clear(self, slot: int) -> None:
        """Forget a slot's expert; the caller owns the slot then, as after `take_free`."""
        assert self.leases[slot] == 0 and not self.pinned[slot] and self.state[slot] != SlotState.RETIRED
        self._slot_of[int(self.layer[slot])][self.expert[slot]] = -1
        self.state[slot] = SlotState.EMPTY
        self.layer[slot] = self.expert[slot] = -1

    def give_back(self, slot: int) -> None:
        """Return an owned EMPTY slot to the free ones."""
        self._free.append(slot)


class SlotPool(SlotTable):
    """Slots in one arena of the host's memory. Not thread-safe: the store's lock guards it.

    Args:
        num_slots: at least 1.
        slot_nbytes: of one slot, whole pages.
        slab_nbytes: of the slab in it.
        layers, num_experts: as in SlotTable.
    """

    def __init__(
        self, num_slots: int, slot_nbytes: int, slab_nbytes: int, layers: Sequence[int], num_experts: int
    ) -> None:
        assert num_slots >= 1 and slot_nbytes % mmap.PAGESIZE == 0
        super().__init__(num_slots, slot_nbytes, layers, num_experts)
        self._mapping = slot_memory(num_slots * slot_nbytes, slot_nbytes)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.slots = list(self.memory.reshape(num_slots, slot_nbytes))
        self.slabs = [slot[:slab_nbytes] for slot in self.slots]
        self._is_locked = np.zeros(num_slots, bool)

    def retire(self, slot: int) -> None:
        """Hand an owned EMPTY slot's memory to the system; the slot is gone for good."""
        self.state[slot] = SlotState.RETIRED
        self.num_slots -= 1
        self._mapping.madvise(mmap.MADV_DONTNEED, slot * self.slot_nbytes, self.slot_nbytes)

    def pin(self, slot: int, lock: bool) -> bool:
        """Keep a slot's expert until it is unpinned, on request locked in memory: whether the system did that."""
        self.pinned[slot] = True
        self._is_locked[slot] = lock and _call_libc("mlock", self.slots[slot])
        return bool(self._is_locked[slot])

    def unpin(self, slot: int) -> int:
        """Let a slot be evicted again; how many bytes are no longer locked."""
        self.pinned[slot] = False
        if not self._is_locked[slot]:
            return 0
        self._is_locked[slot] = False
        _call_libc("munlock", self.slots[slot])
        return self.slot_nbytes


_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def _call_libc(name: str, memory: np.ndarray) -> bool:
    if _libc is None:
        return False
    function = getattr(_libc, name)
    return function(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)) == 0
