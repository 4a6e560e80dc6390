"""Slots for experts in a device's memory, and the table of addresses through which kernels find them."""

from collections.abc import Collection, Sequence

import numpy as np

from glm_gpu.device import Arena, Device, aligned
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.tiers.slots import SlotState, SlotTable

# Slots are allocated in blocks, so that some can be given back when something else needs the memory. CUDA rounds each
# up to 2 MiB, which the plan does not know: 140 blocks on the largest cards stay within a device's reserve.
BLOCK_BYTES = 1 << 30


class VramSlots(SlotTable):
    """Slots of one size in blocks of a device's memory.

    Args:
        num_transit: so many of the slots are kept for passes of many rows: never free, never to be evicted.

    Attributes:
        addresses: [slots] int64.
        transit: those slots.

    Raises:
        DeviceMemoryError: the device has not so much left; what was allocated is given back.
    """

    def __init__(
        self,
        device: Device,
        num_slots: int,
        num_transit: int,
        slot_nbytes: int,
        layers: Sequence[int],
        num_experts: int,
    ) -> None:
        super().__init__(num_slots, slot_nbytes, layers, num_experts)
        self.transit = frozenset(range(num_transit))  # in the first blocks, which are given back last
        self.take_all_free(self.transit)
        self._device = device
        self._blocks: list[tuple[int, range]] = []
        self.addresses = np.zeros(num_slots, np.int64)
        step = max(1, BLOCK_BYTES // slot_nbytes)
        for first in range(0, num_slots, step):
            slots = range(first, min(num_slots, first + step))
            try:
                address = device.allocate(len(slots) * slot_nbytes)
            except MemoryError:
                self.close()
                raise
            self._blocks.append((address, slots))
            self.addresses[slots.start : slots.stop] = address + slot_nbytes * np.arange(len(slots))

    def close(self) -> None:
        """Give all memory back."""
        while self._blocks:
            self._device.release(self._blocks.pop()[0])

    def block_to_give(self) -> range | None:
        """The slots of the last block that holds no leased one; None when each holds one."""
        for _, slots in reversed(self._blocks):
            if not self.leases[slots.start : slots.stop].any():
                return slots
        return None

    def give(self, slots: range) -> int:
        """Give a block's memory back, its slots being empty and not among the free ones any more; how many bytes."""
        (address,) = (address for address, block in self._blocks if block == slots)
        self._blocks.remove((address, slots))
        self._device.release(address)
        self.state[slots.start : slots.stop] = SlotState.RETIRED
        self.transit -= frozenset(slots)
        self.num_slots -= len(slots)
        return len(slots) * self.slot_nbytes

    def evictable(self) -> np.ndarray:
        slots = super().evictable()
        return slots[~np.isin(slots, list(self.transit))] if self.transit else slots

    def take_all_free(self, slots: Collection[int]) -> None:
        """Take those of these slots that are free out of the list."""
        self._free = [slot for slot in self._free if slot not in slots]


class AddressTable:
    """[layers, E] addresses of slabs in a device's memory, 0 where there is none; the host's copy is what is written.

    A row that has changed is copied when its layer is next asked for, so the host may write rows freely once the
    compute stream has passed their layer.
    """

    def __init__(self, device: Device, layers: Sequence[int], num_experts: int) -> None:
        shape = (len(layers), num_experts)
        self._device = device
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._arena = Arena(device, aligned(8 * len(layers) * num_experts))
        self._rows = self._arena.take(shape, "i64")
        self._host = device.host_array(shape, np.int64)
        self._is_changed = np.ones(len(layers), bool)

    def close(self) -> None:
        """Give its memory back."""
        self._arena.close()

    def address(self, layer: int, expert: int) -> int:
        """Where an expert's slab is, or 0."""
        return int(self._host[self._row_of[layer], expert])

    def set(self, layer: int, experts: int | np.ndarray, addresses: int | np.ndarray) -> None:
        """Write the host's copy."""
        row = self._row_of[layer]
        self._host[row, experts] = addresses
        self._is_changed[row] = True

    def is_complete(self, layer: int) -> bool:
        """Whether every expert of a layer has an address."""
        return bool(self._host[self._row_of[layer]].all())

    def row(self, layer: int) -> View:
        """A layer's row on the device, as it stands now for whatever is queued on the compute stream from now on."""
        row = self._row_of[layer]
        num_experts = self._rows.shape[1]
        view = View(self._rows.ptr + 8 * row * num_experts, (num_experts,), "i64")
        if self._is_changed[row]:
            self._device.load(view, self._host[row], self._device.compute)
            self._is_changed[row] = False
        return view
