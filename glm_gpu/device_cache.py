"""Caches of sequences in devices' memory: for each sequence one run of bytes on every device, for the layers there."""

import weakref
from collections.abc import Sequence

import numpy as np

from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.device import Arena, Device, aligned
from glm_gpu.errors import CapacityError
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.quant import f32_to_bf16


class DeviceCachePool:
    """Room for a number of sequences of full length, reserved at once.

    Args:
        devices: with the layers that each holds.
        layout: what each layer keeps; rows are bfloat16.
        max_length: positions of a sequence.
        num_sequences: how many there may be at a time.

    Attributes:
        offsets: for each layer, bytes from the beginning of a sequence's run to each of its streams; alike for all.

    Raises:
        DeviceMemoryError: a device has not so much memory left.
    """

    def __init__(
        self,
        devices: Sequence[tuple[Device, Sequence[int]]],
        layout: CacheLayout,
        max_length: int,
        num_sequences: int,
    ) -> None:
        assert layout.is_bf16
        self.layout, self.max_length, self.num_sequences = layout, max_length, num_sequences
        self.offsets: list[dict[str, int]] = [{} for _ in layout.widths]
        self._part_of: dict[int, int] = {}
        self._runs: list[View] = []
        self._devices = [device for device, _ in devices]
        for part, (device, layers) in enumerate(devices):
            num_bytes = sequence_bytes(layout, layers, max_length)
            position = 0
            for layer in layers:
                self._part_of[layer] = part
                for name, width in layout.widths[layer].items():
                    self.offsets[layer][name] = position
                    position += aligned(width * layout.item_bytes * max_length)
            arena = Arena(device, num_sequences * num_bytes)
            self._runs.append(arena.take((num_sequences, num_bytes), "u8"))
        self._free = list(range(num_sequences - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Sequences that may still be begun."""
        return len(self._free)

    def new_cache(self) -> "DeviceCache":
        """An empty cache; its room is free again when nobody holds it.

        Raises:
            CapacityError: as many sequences as there is room for are open.
        """
        if not self._free:
            raise CapacityError(
                f"the cache on the GPU holds {self.num_sequences} conversations at a time and all are open; "
                "close one, or reserve more"
            )
        cache = DeviceCache(self, self._free.pop())
        weakref.finalize(cache, self._free.append, cache.index)
        return cache

    def begin(self, part: int, index: int) -> int:
        """Where a sequence's run begins on a device."""
        runs = self._runs[part]
        return runs.ptr + index * runs.shape[1]

    def rows(self, index: int, layer: int, stream: str, start: int, stop: int) -> tuple[Device, View]:
        """Rows of a sequence's stream, and the device that they are on."""
        part, width = self._part_of[layer], self.layout.widths[layer][stream]
        begin = self.begin(part, index) + self.offsets[layer][stream] + start * width * self.layout.item_bytes
        return self._devices[part], View(begin, (stop - start, width), "u16")


class DeviceCache(KVCache):
    """One sequence's rows in devices' memory. Passes on devices write and read them in place.

    `write` and `read` are for rows that come from a file or go there: they copy, and wait.
    """

    def __init__(self, pool: DeviceCachePool, index: int) -> None:
        self.layout, self.max_length, self.length = pool.layout, pool.max_length, 0
        self.pool, self.index = pool, index

    def write(self, layer: int, stream: str, start: int, values: np.ndarray) -> None:
        rows = values if values.dtype == np.uint16 else f32_to_bf16(values)
        device, view = self.pool.rows(self.index, layer, stream, start, start + len(values))
        device.load(view, np.ascontiguousarray(rows), device.compute)
        device.compute.synchronize()

    def read(self, layer: int, stream: str, stop: int) -> np.ndarray:
        device, view = self.pool.rows(self.index, layer, stream, 0, stop)
        rows = np.empty(view.shape, np.uint16)
        device.fetch(rows, view).synchronize()
        return rows


class CacheMirrors:
    """For sequences whose rows the host keeps, as a server does in shared pages: copies on devices, made for passes.

    The host's rows are what counts: a pass finds on the devices what the host has, and leaves its new rows with both.
    """

    def __init__(self, pool: DeviceCachePool) -> None:
        self._pool = pool
        # by the host's cache, the least recently used first: the copy, and how many rows of it hold
        self._mirrors: weakref.WeakKeyDictionary[KVCache, tuple[DeviceCache, int]] = weakref.WeakKeyDictionary()

    def begin(self, caches: Sequence[KVCache]) -> list[DeviceCache]:
        """Where a pass finds the rows of each sequence; waits for copies of rows that devices lack.

        Raises:
            CapacityError: there are more sequences than devices have room for.
        """
        return [cache if isinstance(cache, DeviceCache) else self._mirror(cache, caches) for cache in caches]

    def end(self, sequences: Sequence[tuple[KVCache, int]]) -> None:
        """Bring a pass's new rows to the host.

        Args:
            sequences: caches, their lengths still without the new rows, and their lengths with them.
        """
        for cache, stop in sequences:
            if isinstance(cache, DeviceCache):
                continue
            mirror, start = self._mirrors[cache][0], cache.length
            fetched = []
            for layer, streams in enumerate(cache.layout.widths):
                for name in streams:
                    device, view = self._pool.rows(mirror.index, layer, name, start, stop)
                    rows = np.empty(view.shape, np.uint16)
                    device.fetch(rows, view).synchronize()
                    fetched.append((layer, name, rows))
            for layer, name, rows in fetched:
                cache.write(layer, name, start, rows)
            self._mirrors[cache] = mirror, stop

    def _mirror(self, cache: KVCache, in_pass: Sequence[KVCache]) -> DeviceCache:
        assert cache.layout == self._pool.layout, "a server's rows are bfloat16 on devices"
        mirror, held = self._mirrors.pop(cache, (None, 0))
        if mirror is None:
            if not self._pool.num_free:
                others = [other for other in self._mirrors if not any(other is one for one in in_pass)]
                if others:
                    del self._mirrors[others[0]]
            mirror = self._pool.new_cache()
        self._mirrors[cache] = mirror, cache.length
        for layer, streams in enumerate(cache.layout.widths) if held < cache.length else ():
            for name in streams:
                rows = cache.read(layer, name, cache.length)[held:]
                mirror.write(layer, name, held, np.ascontiguousarray(rows))
        return mirror


def sequence_bytes(layout: CacheLayout, layers: Sequence[int], max_length: int) -> int:
    """What one sequence takes on a device that holds these layers."""
    widths = [width for layer in layers for width in layout.widths[layer].values()]
    return sum(aligned(width * layout.item_bytes * max_length) for width in widths)
