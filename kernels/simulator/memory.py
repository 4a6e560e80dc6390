"""Loads and stores of programs that run together, and what can be wrong with them."""

import ctypes
from collections.abc import Callable, Iterable

import numpy as np

from glm_gpu.kernels.simulator.values import Tensor, Type, from_bits, to_bits

Regions = Callable[[], Iterable[tuple[int, int]]]


class MemoryFault(AssertionError):
    """A kernel touched memory in a way that is wrong on a card, whatever happens there."""


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
        type = pointer.dtype.element_ty
        addresses = pointer.data
        if mask is not None:
            addresses, mask = np.broadcast_arrays(addresses, mask)
        active = addresses if mask is None else addresses[mask]
        if not active.size:
            values = np.zeros(addresses.shape, type.values)
        else:
            begin = self._check(active, pointer.region, type, "load")
            # an address that is masked off may be anything: the first active one is read in its stead
            index = (addresses if mask is None else np.where(mask, addresses, active.flat[0])) - begin
            values = from_bits(_items(begin, int(index.max()), type)[index // type.memory.itemsize], type)
        if self._is_checked and active.size:
            who = np.broadcast_to(programs.reshape(-1, *(1,) * (addresses.ndim - 1)), _over(addresses, programs))
            self._loads.append(_flat(addresses, mask, who, type.memory.itemsize))
        if mask is not None:
            if other is None:
                poison = np.frombuffer(b"\xcb\x7e" * 4, type.memory)[:1]
                values = np.where(mask, values, from_bits(poison.copy(), type))
            else:
                values = np.where(mask, values, other.data.reshape(-1, *(1,) * (values.ndim - 1)))
                values = values.astype(type.values, copy=False)
        return Tensor(values, type)

    def store(self, pointer: Tensor, value: Tensor, mask: np.ndarray | None, programs: np.ndarray) -> None:
        """Have values at addresses once all programs have run."""
        type = pointer.dtype.element_ty
        shape = np.broadcast_shapes(pointer.data.shape, value.data.shape, () if mask is None else mask.shape)
        shape = (len(programs), *shape[1:])
        addresses = np.broadcast_to(pointer.data, shape)
        values = np.broadcast_to(value.data, shape)
        who = np.broadcast_to(programs.reshape(-1, *(1,) * (len(shape) - 1)), shape)
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

    def _check(self, active: np.ndarray, region: tuple[int, int] | None, type: Type, what: str) -> int:
        low, high = int(active.min()), int(active.max()) + type.memory.itemsize
        if region is not None:
            if low < region[0] or high > region[1]:
                raise MemoryFault(f"{what} of bytes {low - region[0]} to {high - region[0]} of {region[1] - region[0]}")
        elif self._regions is not None:
            is_inside = np.zeros(active.shape, np.bool_)
            for begin, num_bytes in self._regions():
                is_inside |= (active >= begin) & (active + type.memory.itemsize <= begin + num_bytes)
            if not is_inside.all():
                raise MemoryFault(f"{what} at {int(active[~is_inside][0]):#x}, where the device has no memory")
        if (active % type.memory.itemsize).any():
            raise MemoryFault(f"{what} of {type} at an address that is no multiple of its size")
        return low

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


def _over(addresses: np.ndarray, programs: np.ndarray) -> tuple[int, ...]:
    return len(programs), *addresses.shape[1:]


def _flat(addresses, mask, who, size):
    addresses = np.broadcast_to(addresses, who.shape)
    if mask is None:
        return addresses.reshape(-1), size, who.reshape(-1)
    mask = np.broadcast_to(mask, who.shape)
    return addresses[mask], size, who[mask]


def _bytes(begin: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(begin), np.uint8)


def _items(begin: int, last: int, type: Type) -> np.ndarray:
    return _bytes(begin, last + type.memory.itemsize).view(type.memory)
