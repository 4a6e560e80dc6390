"""Checkpoint: the weights of a model folder, found by name and read exactly, plain, FP8 or packed."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, KeysView
from functools import cached_property
from pathlib import Path

import numpy as np

from glm_gpu.arrays import line_aligned
from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError
from glm_gpu.fp8 import dequantize_fp8, has_known_scale_shape
from glm_gpu.manifest import Manifest
from glm_gpu.quant import Format, QuantizedMatrix, bf16_to_f32, dequantize, quantize
from glm_gpu.safetensors_index import ShardIndex, TensorInfo, index_shards
from glm_gpu.stored import SCALES_SUFFIX, StoredMatrix, stored_matrices

FP8_SCALE_SUFFIX = "_scale_inv"
# Of each shard: no two models have the same weights there.
FINGERPRINT_BYTES = 4096
_PLAIN_DTYPES = {"F32", "F16", "BF16"}


class Checkpoint:
    """A model folder whose index has been checked; a context manager. Threads may read at the same time.

    Files are opened at their first read and stay open until `close`; the folder is never written.

    Attributes:
        path: the folder.
        config: its config.json.
        manifest: its glm_gpu.json, or None.
        shards: the files in use.
        unused_shards: safetensors files beside them that the index file does not name.
    """

    def __init__(self, path: Path, config: ModelConfig, manifest: Manifest | None, index: ShardIndex):
        self.path = path
        self.config = config
        self.manifest = manifest
        self.shards = index.shards
        self.unused_shards = index.unused
        self._tensors = index.tensors
        self._digest = index.digest
        self._stored = stored_matrices(index.tensors, config, manifest)
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """The checkpoint in a folder; reads config.json, headers and index, no weights.

        Raises:
            CheckpointError: the folder, a shard, the index or the manifest does not add up.
            UnsupportedModelError: the model is of a kind this program does not run.
        """
        path = Path(path)
        config = ModelConfig.open(path)
        manifest = Manifest.open(path)
        if manifest is not None:
            manifest.validate(_sizes(path / name for name in manifest.shards))
        index = index_shards(path)
        if manifest is not None:
            manifest.validate(_sizes(index.shards))
        return cls(path, config, manifest, index)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; reading afterwards is an error. Harmless when repeated."""
        with self._lock:
            self._is_closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    @property
    def names(self) -> KeysView[str]:
        """Every tensor's name, scales included."""
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell models apart, fine-tunes of one model included.

        Made from config.json, every name, type, shape and offset, and the first page of data in each shard.
        """
        digest = hashlib.sha256(hashlib.sha256((self.path / "config.json").read_bytes()).digest() + self._digest)
        first = {}
        for info in self._tensors.values():
            first[info.shard] = min(first.get(info.shard, info.begin), info.begin)
        for shard in self.shards:
            if shard in first:
                digest.update(self._first_page(shard, first[shard]))
        return digest.hexdigest()[:16]

    def _first_page(self, shard: Path, begin: int) -> bytes:
        try:
            return os.pread(self._descriptor(shard), FINGERPRINT_BYTES, begin)
        except OSError as error:
            raise CheckpointError(f"{shard}: cannot be read ({error.strerror}); check the disk") from None

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies, in constant time.

        Raises:
            CheckpointError: there is no such tensor.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name!r}; fetch the model again") from None

    def stored(self, name: str) -> StoredMatrix | None:
        """How a packed weight is stored; None for one of plain numbers or FP8."""
        return self._stored.get(name)

    def weight_problem(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why a weight that is there cannot be read as one of this shape; None when it can. Reads no data."""
        info = self.info(name)
        stored = self.stored(name)
        if stored is not None:
            return None if stored.shape == shape else _other(name, "shape", list(stored.shape), list(shape))
        if info.shape != shape:
            return _other(name, "shape", list(info.shape), list(shape))
        if info.dtype == "F8_E4M3":
            return self._fp8_problem(info)
        if info.dtype not in _PLAIN_DTYPES:
            return _other(name, "type", info.dtype, "BF16, F16, F32, F8_E4M3, or U8 with scales")
        return None

    def _fp8_problem(self, info: TensorInfo) -> str | None:
        scale_name = info.name + FP8_SCALE_SUFFIX
        if scale_name not in self:
            return f"tensor {info.name!r} is FP8 and its scales {scale_name!r} are missing"
        if len(info.shape) != 2:
            return _other(info.name, "shape", list(info.shape), "two dimensions for FP8")
        scales = self.info(scale_name)
        if scales.dtype not in _PLAIN_DTYPES:
            return _other(scale_name, "type", scales.dtype, "F32")
        block = self.config.weight_block_size
        if not has_known_scale_shape(info.shape, scales.shape, block):
            num_rows, num_columns = info.shape
            grid = [-(-num_rows // block[0]), -(-num_columns // block[1])]
            return _other(
                scale_name, "shape", list(scales.shape), f"{grid}, [{num_rows}], [{num_rows}, 1], or one value"
            )
        return None

    def read_into(self, name: str, buffer, drop_pages: bool = False) -> None:
        """Read a tensor's bytes as they are stored into the caller's memory.

        Args:
            name: which.
            buffer: writable, contiguous, exactly as long as the tensor.
            drop_pages: tell the kernel that these bytes of the file will not be needed again soon.

        Raises:
            CheckpointError: no such tensor, the file ended early, or it cannot be read.
        """
        info = self.info(name)
        view = memoryview(buffer)
        if info.nbytes == 0 == view.nbytes:  # a view without bytes cannot be cast
            return
        view = view.cast("B")
        assert len(view) == info.nbytes, (name, len(view), info.nbytes)
        self._read_range(info, 0, view, drop_pages)

    def _read_range(self, info: TensorInfo, offset: int, view: memoryview, drop_pages: bool) -> None:
        """Read the bytes of a tensor from `offset` on, as many as `view` holds."""
        descriptor = self._descriptor(info.shard)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], info.begin + offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{info.shard}: tensor {info.name!r} cannot be read ({error.strerror}); check the disk"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{info.shard}: tensor {info.name!r} ends after {offset + done} bytes, expected {info.nbytes}; "
                    "the file was changed while it was in use, fetch it again"
                )
            done += count
        if drop_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, info.begin + offset, len(view), os.POSIX_FADV_DONTNEED)

    def read_raw(self, name: str, drop_pages: bool = False) -> np.ndarray:
        """A tensor's bytes as they are stored: [nbytes] uint8, on a cache line. Raises as `read_into` does."""
        result = line_aligned(self.info(name).nbytes)
        self.read_into(name, result, drop_pages)
        return result

    def read_f32(self, name: str, drop_pages: bool = False) -> np.ndarray:
        """A weight as numbers, from whatever it is stored as: f32 in its shape, all finite.

        Raises:
            CheckpointError: as `read_into`; a type or scale that is not understood; a value or scale that is not
                finite, named with its index.
        """
        if name in self._stored:
            return dequantize(self._read_packed(name, drop_pages))
        shape = self.info(name).shape
        raw = self.read_rows(name, 0, shape[0] if shape else 1, drop_pages)
        return self.decode_rows(name, raw).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int, drop_pages: bool = False) -> np.ndarray:
        """The bytes of rows start..stop-1 of a weight that is not packed, and no others: [rows, bytes of a row] uint8.

        Raises:
            CheckpointError: as `read_into`, or the weight's type or scales are not understood.
        """
        assert name not in self._stored, name
        info = self.info(name)
        problem = self.weight_problem(name, info.shape)
        if problem:
            raise CheckpointError(f"{self.path}: {problem}; fetch the model again or convert it again")
        num_rows = info.shape[0] if info.shape else 1
        assert 0 <= start <= stop <= num_rows, (name, start, stop, info.shape)
        row_bytes = info.nbytes // num_rows if num_rows else 0
        raw = np.empty((stop - start, row_bytes), np.uint8)
        self._read_range(info, start * row_bytes, memoryview(raw.reshape(-1)), drop_pages)
        return raw

    def decode_rows(self, name: str, raw: np.ndarray, first_row: int = 0) -> np.ndarray:
        """The numbers that rows from `read_rows` stand for: f32 [rows, ...], all finite. Reads only the scales of FP8.

        Raises:
            CheckpointError: a value or scale is not finite; the message has its index in the whole weight.
        """
        info = self.info(name)
        if info.dtype == "F8_E4M3":
            scales = self.read_f32(name + FP8_SCALE_SUFFIX)
            values = dequantize_fp8(raw, scales, self.config.weight_block_size, first_row, info.shape[0])
        elif info.dtype == "BF16":
            values = bf16_to_f32(raw.view(np.uint16))
        else:
            values = raw.view(np.float16 if info.dtype == "F16" else np.float32).astype(np.float32, copy=False)
        values = values.reshape(len(raw), *info.shape[1:])
        self.check_finite(name, values, first_row)
        return values

    def read_matrix(
        self,
        name: str,
        shape: tuple[int, int],
        format: Format,
        drop_pages: bool = False,
        quantizer: Callable[[np.ndarray, Format], QuantizedMatrix] = quantize,
    ) -> QuantizedMatrix:
        """A weight ready for the kernels.

        A packed weight is returned as it is stored, whichever packed format is asked for; `stored` tells beforehand.
        Everything else, and a packed weight asked for as plain numbers, is decoded and put into the format.

        Args:
            quantizer: puts numbers, [O, I] f32, into the format; without one they are rounded to nearest.

        Raises:
            CheckpointError: as `read_f32`, or the weight has another shape.
        """
        problem = self.weight_problem(name, shape)
        if problem:
            raise CheckpointError(f"{self.path}: {problem}; fetch the model again or convert it again")
        if name in self._stored and format.is_packed:
            return self._read_packed(name, drop_pages)
        return quantizer(self.read_f32(name, drop_pages), format)

    def check_finite(self, name: str, values: np.ndarray, first_row: int = 0) -> None:
        """Refuse numbers of a tensor, from row `first_row` of it on, unless all are finite.

        Raises:
            CheckpointError: one is not; the message has its index in the whole tensor.
        """
        is_finite = np.isfinite(values)
        if not is_finite.all():
            index = np.argwhere(~is_finite)[0].tolist()
            value = values[tuple(index)]
            index[:1] = [index[0] + first_row]
            raise CheckpointError(
                f"{self.info(name).shard}: tensor {name!r} is {value} at {index}, "
                "expected a finite number; fetch the file again"
            )

    def _read_packed(self, name: str, drop_pages: bool) -> QuantizedMatrix:
        stored = self._stored[name]
        num_rows = stored.shape[0]
        data = self.read_raw(name, drop_pages).reshape(num_rows, -1)
        scales = self.read_raw(name + SCALES_SUFFIX, drop_pages).view(stored.scale_dtype).reshape(num_rows, -1)
        self.check_finite(name + SCALES_SUFFIX, scales)
        return QuantizedMatrix(stored.format, stored.shape, data, scales)

    def _descriptor(self, shard: Path) -> int:
        with self._lock:
            assert not self._is_closed, f"{self.path} is closed"
            if shard not in self._descriptors:
                try:
                    self._descriptors[shard] = os.open(shard, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{shard}: cannot be opened ({error.strerror}); check the folder") from None
            return self._descriptors[shard]


def _sizes(paths: Iterable[Path]) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in paths if path.is_file()}


def _other(name: str, what: str, found, expected) -> str:
    return f"tensor {name!r} has {what} {found}, expected {expected}"
