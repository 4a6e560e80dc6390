"""Writing one safetensors file: data on a page border, tensor after tensor, visible only when complete."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glm_gpu.safetensors_index import DTYPE_BITS
from glm_gpu.state import sync_folder

TEMPORARY_SUFFIX = ".partial"
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class WrittenShard:
    """What a finished file is: its size and the SHA-256 of all its bytes, in hex."""

    nbytes: int
    sha256: str


def write_safetensors(
    path: Path,
    tensors: Iterable,
    align: int = 4096,
    metadata: dict | None = None,
    before_rename: Callable[[WrittenShard], None] | None = None,
) -> WrittenShard:
    """Write a safetensors file whose data begins on a multiple of `align`, in the order given, without gaps.

    The file is written as `path` + ".partial", flushed to the disk and renamed: under its own name it is complete or
    absent. On failure the temporary file is removed and the error passed on.

    Args:
        path: where the file ends up; an older file there is replaced.
        tensors: (name, dtype, shape, data) each; dtype as in the format ("U8", "F32", "BF16", ...); data a contiguous
            buffer, or a function of no arguments that returns one, or an iterator of several, when its turn comes, so
            that only a part of one tensor needs to be in memory.
        align: bytes; the header is padded with spaces up to it.
        metadata: strings by name for the header's `__metadata__`.
        before_rename: called when all bytes are on the disk, before the file gets its name; whoever keeps a record of
            finished files makes it here, so that no file has its name without one.

    Raises:
        ValueError: a name is given twice, or data has another size than its dtype and shape say.
        OSError: the disk is full, or the folder cannot be written.
    """
    tensors = list(tensors)
    partial = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with partial.open("wb") as file:
            hasher = hashlib.sha256()
            header = safetensors_header([tensor[:3] for tensor in tensors], align, metadata)
            file.write(header)
            hasher.update(header)
            for name, dtype, shape, data in tensors:
                _write_one(file, hasher, name, tensor_nbytes(dtype, shape), data)
            file.flush()
            os.fsync(file.fileno())
            written = WrittenShard(file.tell(), hasher.hexdigest())
        if before_rename:
            before_rename(written)
        partial.rename(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return written


def _write_one(file, hasher, name: str, nbytes: int, data) -> None:
    data = data() if isinstance(data, Callable) else data
    done = 0
    for part in data if isinstance(data, Iterator) else (data,):
        view = memoryview(part)
        view = view.cast("B") if view.nbytes else view[:0]  # a view without bytes cannot be cast
        for begin in range(0, len(view), _WRITE_BYTES):
            chunk = view[begin : begin + _WRITE_BYTES]
            file.write(chunk)
            hasher.update(chunk)
        done += len(view)
    if done != nbytes:
        raise ValueError(f"tensor {name!r}: {done} bytes of data, expected {nbytes} from its dtype and shape")


def safetensors_header(tensors: Iterable, align: int = 4096, metadata: dict | None = None) -> bytes:
    """The bytes before the data of a file that `write_safetensors` writes: length, JSON, spaces up to the border.

    Args:
        tensors: (name, dtype, shape) each, in order.
        align, metadata: as there.

    Raises:
        ValueError: a name is given twice.
    """
    entries = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        if name in entries:
            raise ValueError(f"tensor {name!r} is given twice")
        begin, end = end, end + tensor_nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor of that type and shape takes in a file."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
