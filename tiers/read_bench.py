"""How fast experts can be read here: sizes, modes, and depths measured, and what the page cache had of them."""

import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_gpu.tiers.files import DIRECT_ALIGNMENT, ReadMode, Run
from glm_gpu.tiers.slots import slot_memory

DEPTHS = (1, 2, 4, 8, 16)
# Readings of one row: enough for a median and a spread.
ROUNDS = 3
# Above this share of cached pages a row is a figure of memory, not of the disk.
CACHED_LIMIT = 0.05


@dataclass(frozen=True)
class ReadRate:
    """One row of the bench.

    Attributes:
        depth: reads in flight.
        rates: of each round, 10^9 bytes a second; none where the mode was refused.
        cached_share: pages that the page cache held just before, over all rounds.
        refused: why the mode does not work on this file system.
    """

    mode: ReadMode
    depth: int
    rates: tuple[float, ...]
    cached_share: float
    refused: str | None = None

    @property
    def gb_s(self) -> float:
        """The median round; 0 without any."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def is_disk(self) -> bool:
        """Whether the figure tells about the disk."""
        return self.refused is None and (self.mode == "direct" or self.cached_share <= CACHED_LIMIT)


def measure_reads(runs: Sequence[Run], seconds: float) -> list[ReadRate]:
    """Read whole experts in random order, in each mode and at each depth.

    Before a buffered row the kernel is asked to drop the files' pages; whether it did is looked up, not assumed.

    Args:
        runs: experts to choose from.
        seconds: for each round of each row.
    """
    return [_row(runs, mode, depth, seconds) for mode in ("buffered", "direct") for depth in DEPTHS]


def cached_share(runs: Sequence[Run]) -> float:
    """Share of the runs' pages that lie in the page cache now; 1 where the system cannot tell."""
    if not hasattr(ctypes.CDLL(None), "mincore"):
        return 1.0
    resident = pages = 0
    for run in runs:
        vector = _resident_pages(run)
        resident += int(vector.sum())
        pages += len(vector)
    return resident / max(1, pages)


def _row(runs: Sequence[Run], mode: ReadMode, depth: int, seconds: float) -> ReadRate:
    rng = np.random.default_rng(depth)
    rates, shares = [], []
    for _ in range(ROUNDS):
        order = [runs[n] for n in rng.permutation(len(runs))]
        if mode == "buffered":
            _drop_pages(order)
        shares.append(cached_share(order[:64]))
        try:
            rates.append(read_rate(order, mode, depth, seconds))
        except OSError as error:
            return ReadRate(mode, depth, (), shares[0], refused=error.strerror)
    return ReadRate(mode, depth, tuple(rates), statistics.mean(shares))


def read_rate(order: Sequence[Run], mode: ReadMode, depth: int, seconds: float) -> float:
    """GB/s of reading runs in order, over and over, with `depth` threads, each of which reads at least once.

    Raises:
        OSError: the file system refuses the mode.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if mode == "direct" else 0)
    descriptors = {path: os.open(path, flags) for path in {run.shard for run in order}}
    position, num_bytes, failures, lock = iter(range(1 << 60)), [0], [], threading.Lock()
    began = time.perf_counter()

    def work() -> None:
        largest = max(run.nbytes for run in order)
        # on huge pages as slots are, where a direct read has 500 times fewer pieces of memory to fill
        view = memoryview(slot_memory(largest + 2 * DIRECT_ALIGNMENT, largest))
        while not failures:
            with lock:
                number = next(position)
            if number >= len(order) and mode == "buffered":
                return  # a second time around the pages would be cached
            run = order[number % len(order)]
            begin = run.begin // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            stop = -(-(run.begin + run.nbytes) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
            try:
                count = os.preadv(descriptors[run.shard], [view[: stop - begin]], begin)
            except OSError as error:
                failures.append(error)
                return
            with lock:
                num_bytes[0] += count
            if time.perf_counter() - began >= seconds:
                return

    threads = [threading.Thread(target=work) for _ in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    for descriptor in descriptors.values():
        os.close(descriptor)
    if failures:
        raise failures[0]
    return num_bytes[0] / elapsed / 1e9


def _drop_pages(runs: Sequence[Run]) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for path in {run.shard for run in runs}:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # dirty pages are not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _resident_pages(run: Run) -> np.ndarray:
    """[pages] uint8 of 0 and 1: which of the run's pages are in memory."""
    begin = run.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    nbytes = run.begin + run.nbytes - begin
    with run.shard.open("rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ, offset=begin) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        vector = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(nbytes)
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, length, ctypes.c_void_p(vector.ctypes.data))
        del view
    return np.ones_like(vector) if failed else vector & 1
