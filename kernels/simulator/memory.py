"""Loads and stores of programs that run together, and what can be wrong with them."""

import ctypes
from collections.abc import Callable, Iterable

import numpy as np

from glm_gpu.kernels.simulator.values import Tensor, Type, from_bits, to_bits

# Bytes of a lane that was masked off: a large number in every type.
_POISON = b"\xcb\x7e" * 4

Regions = Callable[[], Iterable[tuple[int, int]]]


class MemoryFault(AssertionError):
    """A kernel touched memory in a way that is wrong on a card, whatever happens there."""


class Region:
    """The bytes of an array that was given as an argument: all that pointers made from it may reach."""

    def __init__(self, begin: int, num_bytes: int) -> None:
        self.begin, self.end = begin, begin + num_bytes
        self._bytes = _bytes(begin, num_bytes) if num_bytes else np.zeros(0, np.uint8)

    def items(self, type: Type) -> np.ndarray:
        """The bytes as numbers of a type."""
        return self._bytes.view(type.memory)


class Memory:
    """What a launch does to memory: loads see it as it was before, stores happen when all programs have run.

    Args:
        regions: gives (begin, bytes) of all memory that addresses from tables may reach; None lets them reach anything.
        is_checked: look for races too: an address stored twice, or loaded by one program and stored by another. Costs
            several times the run itself.
    """

    def __init__(self, regions: Regions | None, is_checked: bool) -> None:
        self._regions = regions
        self._is_checked = is_checked
        self._stores: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # addresses, bits, programs
        self._loads: list[tuple[np.ndarray, int, np.ndarray]] = []  # addresses, item size, programs
        self._marks = 0, 0

    def mark(self) -> None:
        """Where `rewind` goes back to."""
        self._marks = len(self._stores), len(self._loads)

    def rewind(self) -> None:
        """Forget what was done since `mark`: its programs run again, in smaller company."""
        stores, loads = self._marks
        del self._stores[stores:], self._loads[loads:]

    def load(self, pointer: Tensor, mask: np.ndarray | None, other: Tensor | None, programs: np.ndarray) -> Tensor:
        """Values at addresses; where the mask is off `other`, or without one what no kernel may rely on."""
        type, region = pointer.dtype.element_ty, pointer.region
        addresses = pointer.data
        if mask is not None and mask.shape != addresses.shape:
            addresses, mask = np.broadcast_arrays(addresses, mask)
        if mask is not None and not mask.any():
            values = np.zeros(addresses.shape, type.values)
        else:
            # an address that is masked off may be anything: one that is not is read in its stead
            read = addresses if mask is None else np.where(mask, addresses, addresses.flat[mask.argmax()])
            low, high = self._check(read, region, type, "load")
            begin = low if region is None else region.begin
            items = _items(low, high, type) if region is None else region.items(type)
            values = from_bits(items[(read - begin) >> type.shift], type)
            if self._is_checked:
                who = np.broadcast_to(_like(programs, addresses), (len(programs), *addresses.shape[1:]))
                self._loads.append(_flat(addresses, mask, who, type.memory.itemsize))
        if mask is not None:
            instead = from_bits(np.frombuffer(_POISON, type.memory)[:1], type) if other is None else other.data
            values = np.where(mask, values, _like(instead, values)).astype(type.values, copy=False)
        return Tensor(values, type)

    def store(self, pointer: Tensor, value: Tensor, mask: np.ndarray | None, programs: np.ndarray) -> None:
        """Have values at addresses once all programs have run."""
        type = pointer.dtype.element_ty
        shape = np.broadcast_shapes(pointer.data.shape, value.data.shape, () if mask is None else mask.shape)
        shape = (len(programs), *shape[1:])
        addresses = np.broadcast_to(pointer.data, shape)
        values = np.broadcast_to(value.data, shape)
        who = np.broadcast_to(_like(programs, pointer.data), shape)
        if mask is not None:
            mask = np.broadcast_to(mask, shape)
            addresses, values, who = addresses[mask], values[mask], who[mask]
        if not addresses.size:
            return
        self._check(addresses, pointer.region, type, "store")
        addresses, who = addresses.reshape(-1), who.reshape(-1)
        if self._is_checked:
            order = np.lexsort((who, addresses))
            if ((np.diff(addresses[order]) == 0) & (np.diff(who[order]) == 0)).any():
                raise MemoryFault("a store writes an address twice")
        self._stores.append((addresses, to_bits(values.reshape(-1), type), who))

    def finish(self) -> None:
        """Make the stores happen."""
        if self._is_checked:
            self._check_races()
        for addresses, bits, _ in self._stores:
            begin = int(addresses.min())
            items = _bytes(begin, int(addresses.max()) - begin + bits.itemsize).view(bits.dtype)
            items[(addresses - begin) // bits.itemsize] = bits

    def _check(self, read: np.ndarray, region: Region | None, type: Type, what: str) -> tuple[int, int]:
        """The lowest and the highest address."""
        size = type.memory.itemsize
        low, high = int(read.min()), int(read.max())
        if region is not None:
            # items of an array lie at multiples of their size, as the array does
            if low < region.begin or high + size > region.end:
                raise MemoryFault(
                    f"{what} of bytes {low - region.begin} to {high + size - region.begin} "
                    f"of {region.end - region.begin}"
                )
            return low, high
        if self._regions is not None:
            is_inside = np.zeros(read.shape, np.bool_)
            for begin, num_bytes in self._regions():
                is_inside |= (read >= begin) & (read + size <= begin + num_bytes)
            if not is_inside.all():
                raise MemoryFault(f"{what} at {int(read[~is_inside][0]):#x}, where the device has no memory")
        if (read & (size - 1)).any():
            raise MemoryFault(f"{what} of {type} at an address that is no multiple of its size")
        return low, high

    def _check_races(self) -> None:
        if not self._stores:
            return
        addresses = np.concatenate([a + i for a, bits, _ in self._stores for i in range(bits.itemsize)])
        writers = np.concatenate([who for _, bits, who in self._stores for _ in range(bits.itemsize)])
        order = np.argsort(addresses, kind="stable")
        addresses, writers = addresses[order], writers[order]
        is_same = addresses[1:] == addresses[:-1]
        if (writers[1:] != writers[:-1])[is_same].any():
            raise MemoryFault("two programs store to one address")
        for loaded, size, readers in self._loads:
            place = np.minimum(np.searchsorted(addresses, loaded), len(addresses) - 1)
            overlaps = (addresses[place] >= loaded) & (addresses[place] < loaded + size)
            if (overlaps & (writers[place] != readers)).any():
                raise MemoryFault("a program loads what another one stores")


def _like(values: np.ndarray, block: np.ndarray) -> np.ndarray:
    """One value for each program, with an axis for each of a block's."""
    return values if values.ndim == block.ndim else values.reshape(-1, *(1,) * (block.ndim - 1))


def _flat(addresses, mask, who, size):
    addresses = np.broadcast_to(addresses, who.shape)
    if mask is None:
        return addresses.reshape(-1), size, who.reshape(-1)
    mask = np.broadcast_to(mask, who.shape)
    return addresses[mask], size, who[mask]


def _bytes(begin: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(begin), np.uint8)


def _items(low: int, high: int, type: Type) -> np.ndarray:
    return _bytes(low, high - low + type.memory.itemsize).view(type.memory)
