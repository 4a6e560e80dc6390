"""Routing traces: what a run chose, pass by pass, in a file small enough to leave on.

Layout of a trace file, integers little-endian:
    one line of ASCII: `glm-gpu trace 1`
    one line of JSON: the header, see `TraceHeader`
    frames: u32 number of bytes, u32 CRC-32 of them, the bytes: zlib over records
    record: u8 phase (0 prefill, 1 decode), u16 layer, u32 T, then ids [T, K], u8 each up to 256 experts, else u16
A frame is written at a time, so a run that dies leaves a file whose last frame may be torn, and all others good.
"""

import dataclasses
import json
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.json_file import parse_json_object
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import PHASES
from glm_gpu.tiers.sizes import ModelSizes

log = logging.getLogger(__name__)

_MAGIC = b"glm-gpu trace 1\n"
_MAX_HEADER = 1 << 20
_FRAME = struct.Struct("<II")
_RECORD = struct.Struct("<BHI")
# Raw bytes of a frame: about 60 tokens of GLM-5.2, and what a crash may cost.
_FRAME_BYTES = 1 << 16
_MAX_FRAME_BYTES = 1 << 24
# The demo's routing compresses to a half; to less only where tokens repeat.
_MAX_RATIO = 32


@dataclasses.dataclass(frozen=True)
class TraceHeader:
    """Which model a trace is of.

    Attributes:
        fingerprint: the checkpoint's.
        num_layers: L, layers counted from 0, the multi-token layer included.
        num_experts: E.
        experts_per_tok: K.
        slab_nbytes: [L], bytes of one expert in each layer; 0 in layers without experts.
    """

    fingerprint: str
    num_layers: int
    num_experts: int
    experts_per_tok: int
    slab_nbytes: tuple[int, ...]

    @property
    def id_dtype(self) -> np.dtype:
        return np.dtype("<u1" if self.num_experts <= 256 else "<u2")


def trace_header(files: ExpertFiles, sizes: ModelSizes) -> TraceHeader:
    """The header of a trace of the model whose experts these are."""
    return TraceHeader(
        files.fingerprint, len(sizes.slab_nbytes), sizes.num_experts, sizes.experts_per_tok, sizes.slab_nbytes
    )


@dataclasses.dataclass(frozen=True)
class Routing:
    """One pass's choices in one layer: ids [T, K], a row for each token in its order."""

    phase: Phase
    layer: int
    ids: np.ndarray


class TraceWriter:
    """Writes a trace; a context manager. A disk that fails ends the trace with one warning, never the run.

    Raises:
        RequestError: the file cannot be made.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._path, self._header = path, header
        self._buffer = bytearray()
        try:
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise RequestError(f"--trace {path}: cannot be written ({error.strerror}); give another file") from None
        self._write(_MAGIC + json.dumps(dataclasses.asdict(header)).encode() + b"\n")

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, layer: int, ids: np.ndarray, num_decode: int) -> None:
        """Add one pass's choices, ids [T, K] int, of which the first `num_decode` are answers'.

        Writes a frame now and then; never waits for the disk to be done.
        """
        if self._file is None:
            return
        phases: tuple[tuple[Phase, np.ndarray], ...] = (("decode", ids[:num_decode]), ("prefill", ids[num_decode:]))
        for phase, part in phases:
            if len(part):
                self._buffer += _RECORD.pack(PHASES.index(phase), layer, len(part))
                self._buffer += part.astype(self._header.id_dtype).tobytes()
        if len(self._buffer) >= _FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded since the last frame."""
        if self._buffer and self._file is not None:
            data = zlib.compress(self._buffer, 6)
            self._buffer.clear()
            self._write(_FRAME.pack(len(data), zlib.crc32(data)) + data)

    def close(self) -> None:
        """Write the rest and close the file. Harmless when repeated."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            log.warning("%s: the trace ends here (%s)", self._path, error.strerror)
            self._file, file = None, self._file
            _close_quietly(file)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A recorded run. `is_torn`: the file ended inside a frame, or a frame was damaged; what lies behind is lost."""

    header: TraceHeader
    routings: list[Routing]
    is_torn: bool

    def tokens(self, phase: Phase) -> int:
        """Tokens that passed through the busiest layer."""
        counts = np.zeros(self.header.num_layers, np.int64)
        for routing in self.routings:
            if routing.phase == phase:
                counts[routing.layer] += len(routing.ids)
        return int(counts.max(initial=0))


def read_trace(path: Path) -> Trace:
    """A trace with all its whole frames.

    Raises:
        RequestError: the file cannot be read or is no trace.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
            data = file.read()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); give a file that --trace wrote") from None
    routings: list[Routing] = []
    position, allowed_bytes = 0, _MAX_FRAME_BYTES + _MAX_RATIO * len(data)
    while position < len(data):
        raw, position = _read_frame(data, position)
        if raw is None:
            break
        allowed_bytes -= len(raw)
        if allowed_bytes < 0:
            raise RequestError(f"{path}: holds more than {_MAX_RATIO} times its size; record the trace again")
        routings += _records(path, raw, header)
    is_torn = position < len(data)
    if is_torn:
        log.warning("%s: damaged after %d passes, the rest is left out", path, len(routings))
    return Trace(header, routings, is_torn)


def _read_header(path: Path, file: BinaryIO) -> TraceHeader:
    if file.readline(len(_MAGIC)) != _MAGIC:
        raise RequestError(f"{path}: no trace of this version; give a file that --trace wrote")
    try:
        fields = parse_json_object(file.readline(_MAX_HEADER), str(path))
        header = TraceHeader(**{**fields, "slab_nbytes": tuple(fields["slab_nbytes"])})
        is_sound = (
            0 < header.num_layers < 1 << 16
            and 0 < header.experts_per_tok <= header.num_experts <= 1 << 16
            and len(header.slab_nbytes) == header.num_layers
            and isinstance(header.fingerprint, str)
            and all(type(nbytes) is int and nbytes >= 0 for nbytes in header.slab_nbytes)
        )
    except (ValueError, TypeError, KeyError, CheckpointError):
        is_sound = False
    if not is_sound:
        raise RequestError(f"{path}: the header of the trace is damaged; record it again")
    return header


def _read_frame(data: bytes, position: int) -> tuple[bytes | None, int]:
    """A frame's records and where the next one begins; None and the same position where it is not whole."""
    begin = position + _FRAME.size
    if begin > len(data):
        return None, position
    num_bytes, checksum = _FRAME.unpack_from(data, position)
    compressed = data[begin : begin + num_bytes]
    if len(compressed) < num_bytes or zlib.crc32(compressed) != checksum:
        return None, position
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(compressed, _MAX_FRAME_BYTES)
    except zlib.error:
        return None, position
    return (raw, begin + num_bytes) if decompressor.eof else (None, position)


def _records(path: Path, raw: bytes, header: TraceHeader) -> Iterator[Routing]:
    position = 0
    while position < len(raw):
        try:
            phase, layer, num_tokens = _RECORD.unpack_from(raw, position)
            position += _RECORD.size
            shape = (num_tokens, header.experts_per_tok)
            ids = np.frombuffer(raw, header.id_dtype, shape[0] * shape[1], position).reshape(shape)
        except (struct.error, ValueError):
            raise RequestError(f"{path}: a record is longer than its frame; record the trace again") from None
        position += ids.nbytes
        if phase >= len(PHASES) or layer >= header.num_layers or ids.max(initial=0) >= header.num_experts:
            raise RequestError(f"{path}: a record names layer {layer} or an expert that the header does not have")
        yield Routing(PHASES[phase], layer, ids)


def _close_quietly(file: BinaryIO) -> None:
    try:
        file.close()
    except OSError:
        log.debug("closing a trace failed too", exc_info=True)
