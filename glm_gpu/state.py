"""Files the program keeps between runs: versioned, checksummed, replaced whole, and never beside a model.

Layout of such a file:
    one line of ASCII: `glm-gpu KIND VERSION SHA256`, the last 64 hex digits over every byte that follows the line
    one line of JSON: {"header": {...}, "arrays": [[name, dtype, [shape]], ...]}
    the arrays' bytes in that order, C order, little-endian, nothing between them
"""

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from glm_gpu.errors import CheckpointError
from glm_gpu.json_file import parse_json_object

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 30
_MAX_FIRST_LINE = 256
_TEMPORARY_SUFFIX, _LEFTOVER_S = ".tmp", 3600.0
_DTYPES = frozenset({"|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8"})


def state_folder(environment: Mapping[str, str], platform: str) -> Path | None:
    """Where this user's state goes; None where nothing says, and then nothing is kept.

    Args:
        environment: as os.environ; XDG_STATE_HOME, HOME, LOCALAPPDATA are looked at.
        platform: as sys.platform.

    Source: XDG base directory specification 0.8, which has relative paths ignored.
    """
    if platform == "win32":
        local = environment.get("LOCALAPPDATA", "")
        return Path(local) / "glm-gpu" / "state" if local else None
    xdg, home = environment.get("XDG_STATE_HOME", ""), environment.get("HOME", "")
    if xdg.startswith("/"):
        return Path(xdg) / "glm-gpu"
    if not home.startswith("/"):
        return None
    return Path(home) / ("Library/Application Support/glm-gpu" if platform == "darwin" else ".local/state/glm-gpu")


def write_state(path: Path, kind: str, version: int, header: dict, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace a file with this content, or leave the old one: it is never seen half-written, not even after a crash.

    Folders are made as needed. Of two writers the later one wins.

    Raises:
        OSError: the folder cannot be made or written.
    """
    named = {name: array.astype(array.dtype.newbyteorder("<"), order="C") for name, array in arrays.items()}
    table = [[name, array.dtype.str, list(array.shape)] for name, array in named.items()]
    body = json.dumps({"header": header, "arrays": table}).encode() + b"\n"
    body += b"".join(array.tobytes() for array in named.values())
    first_line = f"glm-gpu {kind} {version} {hashlib.sha256(body).hexdigest()}\n".encode()
    replace_file(path, first_line + body, is_synced=True)


def replace_file(path: Path, data: bytes, is_synced: bool) -> None:
    """Give a file new content under its old name, in one step.

    Args:
        is_synced: wait until the content is on the disk before the name is moved to it.

    Raises:
        OSError: the folder cannot be made or written.
    """
    with replacing(path, is_synced) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, is_synced: bool = True) -> Iterator[BinaryIO]:
    """As `replace_file`, by a file to write to. Only its owner can read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_leftovers(path.parent, path.name)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_TEMPORARY_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if is_synced:
        sync_folder(path.parent)


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove temporary files that killed processes left, an hour after they were last written.

    Args:
        name: of the files that they were to become; may have stars.
    """
    for path in folder.glob(f".{name}.*{_TEMPORARY_SUFFIX}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path, kind: str, version: int) -> tuple[dict, dict[str, np.ndarray]] | None:
    """A file's header and arrays; None when there is none, or none to trust.

    A file that is damaged, of another kind, or of another version is left where it is and told of in one warning.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        return _parse(path.read_bytes(), kind, version)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, CheckpointError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        log.warning("%s: not used (%s); starting afresh", path, reason)
        return None


def _parse(data: bytes, kind: str, version: int) -> tuple[dict, dict[str, np.ndarray]]:
    first_line, _, body = data[:_MAX_FIRST_LINE].partition(b"\n")
    words = first_line.decode("ascii", "replace").split(" ")
    if len(words) != 4 or words[0] != "glm-gpu":
        raise ValueError("no file of this program")
    if words[1] != kind:
        raise ValueError(f"holds {words[1]!r}, expected {kind!r}")
    if words[2] != str(version):
        raise ValueError(f"format {words[2]}, this version reads {version}")
    body = memoryview(data)[len(first_line) + 1 :]
    if hashlib.sha256(body).hexdigest() != words[3]:
        raise ValueError("checksum does not match, the file is damaged")
    end = data.index(b"\n", len(first_line) + 1)
    content = parse_json_object(data[len(first_line) + 1 : end], "its header")
    header, table = content.get("header"), content.get("arrays")
    if not isinstance(header, dict) or not isinstance(table, list):
        raise ValueError("its header is not one of this program")
    arrays, begin = {}, end + 1
    for entry in table:
        try:
            name, dtype, shape = entry
            if dtype not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
                raise TypeError
        except (TypeError, ValueError):
            raise ValueError("its header describes no array") from None
        count = math.prod(shape)
        arrays[str(name)] = np.frombuffer(data, dtype, count, begin).reshape(shape).astype(dtype[1:])
        begin += count * np.dtype(dtype).itemsize
    return header, arrays
