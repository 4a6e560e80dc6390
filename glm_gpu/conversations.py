"""Conversations on disk: their tokens and cached rows, bound to one model, checked whole before any of it counts.

Layout of a file:
    one line of ASCII: `glm-gpu conversation 1`
    one line of JSON: {"identity": text, "num_ids": N, "num_cached": C, "widths": [{stream: width}, ...],
                       "is_bf16": true or false, "note": any object of the one who saved it}
    N token ids, int32
    for each layer, for each of its streams in the order of `widths`: C rows, bfloat16 bits or float32
    32 bytes: SHA-256 of everything before them
All numbers are little-endian; nothing lies between the parts.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from glm_gpu.arrays import common_length
from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.json_file import parse_json_object
from glm_gpu.state import remove_leftovers, replacing
from glm_gpu.units import format_bytes

log = logging.getLogger(__name__)

SUFFIX = ".conversation"
_FIRST_LINE = b"glm-gpu conversation 1\n"
# A million ids' messages are about 5 MB of text.
_MAX_HEADER_BYTES = 1 << 26
_DIGEST_BYTES = 32
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Saved:
    """What a file holds, apart from its rows.

    Args:
        ids: all tokens.
        num_cached: the first so many of them have rows.
        note: what was saved beside them.
    """

    ids: list[int]
    num_cached: int
    note: dict[str, Any]


def save_conversation(
    path: Path, identity: str, ids: Sequence[int], cache: KVCache, num_cached: int, note: dict[str, Any] | None = None
) -> None:
    """Write a conversation; the file is never seen half-written, and only its owner can read it.

    Args:
        identity: of the model and of everything that the bits of its rows depend on.
        cache: its first `num_cached` rows belong to the first `num_cached` ids.

    Raises:
        OSError: the folder cannot be made or written.
    """
    assert sys.byteorder == "little" and num_cached <= len(ids)
    header = {
        "identity": identity,
        "num_ids": len(ids),
        "num_cached": num_cached,
        "widths": [dict(streams) for streams in cache.layout.widths],
        "is_bf16": cache.layout.is_bf16,
        "note": note or {},
    }
    with replacing(path) as file:
        digest = hashlib.sha256()
        parts = [_FIRST_LINE, json.dumps(header).encode() + b"\n", np.asarray(ids, np.int32).tobytes()]
        parts += [_bytes_of(rows) for rows in _all_rows(cache, num_cached)]
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


class Stopped(Exception):
    """Reading was given up because nobody wants the conversation any more."""


def load_conversation(
    path: Path, identity: str, open_cache: Callable[[int], KVCache], is_wanted: Callable[[], bool] = lambda: True
) -> tuple[Saved, KVCache]:
    """Read a conversation and its rows; the cache's length says that they count only once all is checked.

    Args:
        identity: as it must be in the file.
        open_cache: gives an empty cache that so many rows can be written to.
        is_wanted: asked before each 4 MiB.

    Raises:
        CheckpointError: the file is damaged or of another version.
        RequestError: it is another model's, or `open_cache` has no room for it.
        Stopped: it is not wanted.
    """
    with _opened(path) as file:
        digest = hashlib.sha256()
        saved, layout = _read_head(path, file, identity, digest)
        cache = open_cache(saved.num_cached)
        if (cache.layout.widths, cache.layout.is_bf16) != (layout.widths, layout.is_bf16):
            raise RequestError(f"{path} holds a cache of another format; use the options that it was saved with")
        for layer, streams in enumerate(cache.layout.widths):
            for name in streams:
                rows = cache.read(layer, name, saved.num_cached)
                _read_whole(path, file, _bytes_of(rows), digest, is_wanted)
                cache.write(layer, name, 0, rows)  # which a cache on a device is not a view of
        if file.read(_DIGEST_BYTES + 1) != digest.digest():
            raise _damaged(path, "its checksum does not match")
    cache.length = saved.num_cached
    return saved, cache


@dataclass(frozen=True)
class Found:
    """A conversation on disk that begins as a prompt does.

    Args:
        num_cached: rows in the file.
        num_common: the first so many of them are the prompt's.
    """

    path: Path
    num_cached: int
    num_common: int


class ConversationStore:
    """A folder of conversations of one model that stays below a size; the longest unused go first.

    Of one thread, except for `load`.

    Args:
        folder: made when something is saved; may be shared by several processes.
        identity: as for `save_conversation`; files of another one are left alone but count for the size.
    """

    def __init__(self, folder: Path, identity: str, max_bytes: int) -> None:
        self._folder, self._identity, self._max_bytes = folder, identity, max_bytes
        self._known: dict[Path, tuple[np.ndarray, int]] = {}
        remove_leftovers(folder, f"*{SUFFIX}")
        for path in folder.glob(f"*{SUFFIX}"):
            try:
                with _opened(path) as file:
                    saved, _ = _read_head(path, file, identity, hashlib.sha256())
            except (CheckpointError, RequestError) as error:
                log.info("%s", error)
                continue
            self._known[path] = (np.array(saved.ids, np.int32), saved.num_cached)

    def find(self, ids: Sequence[int], max_length: int) -> Found | None:
        """The conversation that shares most of its beginning with `ids`.

        Args:
            max_length: of the cache it is to be loaded into; longer ones are passed over.
        """
        wanted, best = np.asarray(ids, np.int32), None
        for path, (known, num_cached) in self._known.items():
            common = common_length(known[:num_cached], wanted)
            if num_cached <= max_length and common > (best.num_common if best else 0):
                best = Found(path, num_cached, common)
        return best

    def load(self, found: Found, cache: KVCache, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Put a found conversation's rows into an empty cache that has room for them. Waits for the disk.

        Raises:
            CheckpointError, RequestError, Stopped: as `load_conversation`; the cache is empty still.
        """

        def checked(num_cached: int) -> KVCache:
            if num_cached != found.num_cached:
                raise RequestError(f"{found.path} was replaced meanwhile; it is not used")
            return cache

        load_conversation(found.path, self._identity, checked, is_wanted)
        with contextlib.suppress(OSError):  # another process may have made room just now
            os.utime(found.path)

    def forget(self, found: Found) -> None:
        """Find a conversation no more, for it could not be loaded."""
        self._known.pop(found.path, None)

    def save(self, ids: Sequence[int], cache: KVCache) -> bool:
        """Keep a conversation whose ids all have rows; False when it is too large, or known as part of another.

        Raises:
            OSError: the folder cannot be written.
        """
        new = np.asarray(ids, np.int32)
        if any(len(known) >= len(new) and np.array_equal(known[: len(new)], new) for known, _ in self._known.values()):
            return False
        if len(new) * (cache.layout.bytes_per_token + 4) > self._max_bytes:
            return False
        path = self._folder / f"{hashlib.sha256(self._identity.encode() + new.tobytes()).hexdigest()[:32]}{SUFFIX}"
        save_conversation(path, self._identity, ids, cache, len(new))
        for beginning in [p for p, (k, _) in self._known.items() if np.array_equal(k, new[: len(k)])]:
            self._drop(beginning)
        self._known[path] = (new, len(new))
        self._shrink(keep=path)
        return True

    def _shrink(self, keep: Path) -> None:
        """Delete the longest unused files until the rest is small enough."""
        files = [(path, path.stat()) for path in self._folder.glob(f"*{SUFFIX}")]
        total = sum(facts.st_size for _, facts in files)
        for path, facts in sorted(files, key=lambda file: file[1].st_mtime):
            if total <= self._max_bytes:
                return
            if path != keep:
                self._drop(path)
                total -= facts.st_size

    def _drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._known.pop(path, None)


def _read_head(path: Path, file: BinaryIO, identity: str, digest: Any) -> tuple[Saved, CacheLayout]:
    """Everything before the rows; the file's size is checked against it."""
    first = file.read(len(_FIRST_LINE))
    if first != _FIRST_LINE:
        raise _damaged(path, "it does not begin as a conversation of this version does")
    line = file.readline(_MAX_HEADER_BYTES)
    digest.update(first + line)
    try:
        header = parse_json_object(line, str(path))
        widths = tuple({str(name): int(width) for name, width in streams.items()} for streams in header["widths"])
        layout = CacheLayout(widths, bool(header["is_bf16"]))
        num_ids, num_cached, note = int(header["num_ids"]), int(header["num_cached"]), dict(header["note"])
        found_identity = str(header["identity"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, CheckpointError):
        raise _damaged(path, "its header cannot be read") from None
    size = len(first) + len(line) + 4 * num_ids + layout.bytes_per_token * num_cached + _DIGEST_BYTES
    actual = os.fstat(file.fileno()).st_size
    if not 0 <= num_cached <= num_ids or size != actual:
        raise _damaged(path, f"it has {format_bytes(actual)}, and its header says {format_bytes(size)}")
    if found_identity != identity:
        raise RequestError(
            f"{path} was saved with another model or other formats ({found_identity}, here {identity}); open the model "
            "as it was opened then"
        )
    ids = np.empty(num_ids, np.int32)
    _read_whole(path, file, _bytes_of(ids), digest)
    return Saved(ids.tolist(), num_cached, note), layout


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def _read_whole(
    path: Path, file: BinaryIO, target: memoryview, digest: Any, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    for start in range(0, len(target), _BLOCK_BYTES):
        if not is_wanted():
            raise Stopped
        block = target[start : start + _BLOCK_BYTES]
        if file.readinto(block) != len(block):
            raise _damaged(path, "it ends too early")
        digest.update(block)


def _all_rows(cache: KVCache, stop: int) -> list[np.ndarray]:
    return [cache.read(layer, name, stop) for layer, streams in enumerate(cache.layout.widths) for name in streams]


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or of another version: {what}; it is not used, delete it")
