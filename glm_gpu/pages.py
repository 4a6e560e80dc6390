"""Cache rows of many sequences in pages of one pool: a page may belong to several sequences, and is stored once.

The kernels read a sequence's rows as one array. So the page table is the processor's own: all pages lie in one file in
memory, and each sequence maps those that it uses, one behind the other, into a range of addresses of its own. A read
is a view, whatever the pages are and whoever shares them; no kernel knows of pages, and the bits cannot differ.

Considered instead: to gather pages into an array for each read copies the whole cache in every layer and step, where
sparse attention reads `index_topk` rows of it; a page table in every kernel costs an indirection a row in three kernel
families on two processors; private arrays with copied prefixes keep each shared prefix once for every sequence.

Source: vAttention (arXiv 2405.04437) does the same with CUDA's virtual memory.
"""

import ctypes
import math
import mmap
import os
import sys
import tempfile
from functools import cache

import numpy as np

from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.errors import CapacityError, DeviceError


class PagePool:
    """A bounded number of pages with a count of users each. Not safe for several threads.

    The system commits a page's memory when it is first written; a page that is given back keeps it for the next user.

    Args:
        layout: what a position takes.
        num_tokens: positions to hold, rounded up to whole pages.

    Attributes:
        page_tokens: positions of a page: the fewest at which every stream's part begins on a border of memory pages.

    Raises:
        DeviceError: this system cannot map a file twice.
    """

    def __init__(self, layout: CacheLayout, num_tokens: int) -> None:
        self.layout = layout
        self.row_bytes = [
            {name: width * layout.item_bytes for name, width in streams.items()} for streams in layout.widths
        ]
        sizes = {size for streams in self.row_bytes for size in streams.values()}
        self.page_tokens = math.lcm(*(mmap.PAGESIZE // math.gcd(size, mmap.PAGESIZE) for size in sizes))
        self.num_pages = -(-num_tokens // self.page_tokens)
        self._references = np.zeros(self.num_pages, np.int32)
        self._num_free = self.num_pages
        self._file = _memory_file(self.num_pages * self.page_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return self.page_tokens * self.layout.bytes_per_token

    @property
    def num_free(self) -> int:
        """Pages that nobody uses."""
        return self._num_free

    def close(self) -> None:
        """Give the pool's memory back once the last cache over it is gone."""
        os.close(self._file)

    def references(self, page: int) -> int:
        """How many users a page has."""
        return int(self._references[page])

    def take(self, after: int | None = None) -> int:
        """A free page for one user, the one that follows `after` if it is free.

        Otherwise the middle of the longest free run, so that sequences that grow in turns do not lie in each other's
        way: neighbouring pages are one mapping, and the system bounds how many a process has.

        Raises:
            CapacityError: every page is in use.
        """
        if not self._num_free:
            raise CapacityError(f"all {self.num_pages} pages of {self.page_tokens} tokens of the cache are in use")
        if after is not None and after + 1 < self.num_pages and self._references[after + 1] == 0:
            page = after + 1
        else:
            start, stop = _longest_run(self._references == 0)
            page = start if start == 0 else (start + stop) // 2
        self._references[page] = 1
        self._num_free -= 1
        return page

    def retain(self, page: int) -> None:
        """One more user of a page that is in use."""
        assert self._references[page] > 0, page
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One user fewer; after the last the page is free."""
        assert self._references[page] > 0, page
        self._references[page] -= 1
        self._num_free += self._references[page] == 0

    def map(self, address: int, stream_start: int, row_bytes: int, page: int, count: int) -> None:
        """Make `count` neighbouring pages of one stream appear at an address.

        Args:
            stream_start: bytes of one position in the streams before this one.
            row_bytes: bytes of one position in this stream.

        Raises:
            CapacityError: the system allows no more mappings.
        """
        # All pages of a stream lie together in the file, so that neighbours in the pool are neighbours there.
        offset = (stream_start * self.num_pages + row_bytes * page) * self.page_tokens
        _map_fixed(address, row_bytes * self.page_tokens * count, self._file, offset)


class PagedCache(KVCache):
    """One sequence's rows over pages of a pool; reads and writes like any cache, once `grow` has made room.

    Args:
        max_length: positions it may come to hold; costs addresses, not memory.
    """

    def __init__(self, pool: PagePool, max_length: int) -> None:
        self.layout = pool.layout
        self.max_length = max_length
        self.length = 0
        self.pages: list[int] = []
        self._pool = pool
        room = -(-max_length // pool.page_tokens) * pool.page_tokens
        # Never committed: nothing is written before `grow` has mapped pages over it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = np.frombuffer(mmap.mmap(-1, max(1, room * self.layout.bytes_per_token), flags=flags), np.uint8)
        self._address = memory.ctypes.data
        dtype = np.uint16 if self.layout.is_bf16 else np.float32
        self._streams, self._starts, start = [], [], 0
        for streams in pool.row_bytes:
            self._streams.append({})
            for name, row_bytes in streams.items():
                rows = memory[start * room : (start + row_bytes) * room].view(dtype).reshape(room, -1)
                self._streams[-1][name] = rows
                self._starts.append((start, row_bytes))
                start += row_bytes
        self._room = room

    @property
    def nbytes(self) -> int:
        """Bytes of its pages, shared ones included."""
        return len(self.pages) * self._pool.page_bytes

    @property
    def capacity(self) -> int:
        """Positions that can be written before `grow` is needed."""
        return len(self.pages) * self._pool.page_tokens

    def grow(self, length: int) -> None:
        """Take pages until `length` positions can be written; those taken stay when there are too few.

        Raises:
            CapacityError: the pool has no page left, or the system no mapping.
        """
        assert length <= self.max_length
        taken = self.pages[-1:]
        missing = -(-length // self._pool.page_tokens) - len(self.pages)
        try:
            for _ in range(missing):
                taken.append(self._pool.take(taken[-1] if taken else None))
        finally:
            self._attach(taken[1:] if self.pages else taken)

    def share(self, pages: list[int], tail: tuple[int, int] | None = None) -> None:
        """Begin with the rows of pages that are in use elsewhere; this cache must be empty.

        Args:
            pages: whole pages, used in place.
            tail: a further page and how many rows of it to copy.

        Raises:
            CapacityError: the pool has no page left for the tail, or the system no mapping; the cache is empty again.
        """
        assert not self.pages and not self.length
        for page in pages:
            self._pool.retain(page)
        try:
            self._attach(pages)
            self.length = self.capacity
            if tail is not None:
                self._copy_rows(*tail)
        except CapacityError:
            self.release()
            raise

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on; a page that others use too is left to them as it is.

        Raises:
            CapacityError: the cut lies inside a shared page and there is no free page for a copy.
        """
        assert 0 <= length <= self.length
        num_whole, rest = divmod(length, self._pool.page_tokens)
        dropped = self.pages[num_whole:]
        if dropped and rest and self._pool.references(dropped[0]) == 1:
            dropped.pop(0)
            num_whole, rest = num_whole + 1, 0
        shared = self.pages[:num_whole]
        if rest:
            self._pool.retain(dropped[0])
        for page in dropped:
            self._pool.release(page)
        self.pages, self.length = shared, min(length, num_whole * self._pool.page_tokens)
        if rest:
            try:
                self._copy_rows(dropped[0], rest)
            finally:
                self._pool.release(dropped[0])

    def rewind(self, length: int) -> None:
        """Forget positions from `length` on that only this sequence knows of, as rejected drafts; keeps its pages."""
        assert 0 <= length <= self.length
        self.length = length

    def release(self) -> None:
        """Give all pages back; the cache is empty and may be used again."""
        for page in self.pages:
            self._pool.release(page)
        self.pages, self.length = [], 0

    def _copy_rows(self, source: int, num_rows: int) -> None:
        """Append the first rows of a page: it is mapped at the end for a moment, and a copy of it put there."""
        index, start = len(self.pages), self.length
        page = self._pool.take(self.pages[-1] if self.pages else None)
        try:
            self._map(index, source)
            window = slice(start, start + num_rows)
            copies = [rows[window].copy() for streams in self._streams for rows in streams.values()]
            self._map(index, page)
        except BaseException:
            self._pool.release(page)
            raise
        self.pages.append(page)
        for rows, copied in zip((r for streams in self._streams for r in streams.values()), copies, strict=True):
            rows[window] = copied
        self.length += num_rows

    def _attach(self, pages: list[int]) -> None:
        """Map pages behind those that are there, each run of neighbours at once; those not mapped are released."""
        at = 0
        try:
            while at < len(pages):
                count = 1
                while at + count < len(pages) and pages[at + count] == pages[at] + count:
                    count += 1
                self._map(len(self.pages), pages[at], count)
                self.pages += pages[at : at + count]
                at += count
        finally:
            for page in pages[at:]:
                self._pool.release(page)

    def _map(self, index: int, page: int, count: int = 1) -> None:
        for start, row_bytes in self._starts:
            at = self._address + start * self._room + row_bytes * index * self._pool.page_tokens
            self._pool.map(at, start, row_bytes, page, count)


def _longest_run(free: np.ndarray) -> tuple[int, int]:
    """The first and the position after the last of the longest run of True; there is one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]])))
    starts, stops = edges[::2], edges[1::2]
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest])


def _memory_file(num_bytes: int) -> int:
    """A descriptor of a file that only this process sees: in memory on Linux, elsewhere an unlinked temporary one."""
    if os.name != "posix" or sys.maxsize < 2**32:
        raise DeviceError("a shared cache needs a 64-bit POSIX system; use `run` and `chat`, which do without")
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("glm-gpu cache", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, max(1, num_bytes))
    return descriptor


def _map_fixed(address: int, num_bytes: int, descriptor: int, offset: int) -> None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    found = _libc().mmap(address, num_bytes, protection, flags, descriptor, offset)
    if found != address:
        reason = os.strerror(ctypes.get_errno())
        raise CapacityError(f"the system maps no more pages of the cache ({reason}); raise vm.max_map_count")


_MAP_FIXED = 0x10  # Linux, macOS and the BSDs agree on it; Python's mmap module does not name it


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    return libc
