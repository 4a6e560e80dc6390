"""SHA-256 of files as they lie on the disk."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK_BYTES = 8 << 20


def hash_file(path: Path, from_disk: bool = False) -> str:
    """The SHA-256 of a file, in hex; holds 8 MiB of it at a time.

    Args:
        path: which.
        from_disk: ask the kernel to forget its copy first, so that what is read is what the disk holds.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        if from_disk:
            _forget_pages(file.fileno())
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
        _forget_pages(file.fileno())  # a container is larger than memory; leave the page cache to others
    return digest.hexdigest()


def hash_files(
    paths: Iterable[Path], threads: int, on_hashed: Callable[[Path], None] = lambda path: None
) -> dict[Path, str | None]:
    """The SHA-256 of each file; None for one that cannot be read. `on_hashed` is called in order of `paths`."""
    paths = list(paths)
    hashes: dict[Path, str | None] = {}
    with ThreadPoolExecutor(max(1, threads)) as executor:
        for path, value in zip(paths, executor.map(_hash_or_none, paths), strict=True):
            hashes[path] = value
            on_hashed(path)
    return hashes


def _hash_or_none(path: Path) -> str | None:
    try:
        return hash_file(path)
    except OSError:
        return None


def _forget_pages(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
