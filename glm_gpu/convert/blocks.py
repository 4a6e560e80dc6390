"""The weights of one output shard, read, decoded and quantized by threads a few blocks of rows ahead of the writer."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from glm_gpu.checkpoint import FP8_SCALE_SUFFIX, Checkpoint
from glm_gpu.convert.ahead import in_order
from glm_gpu.convert.plan import PlannedShard, PlannedTensor
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.errors import CheckpointError
from glm_gpu.kernels.quantize import decode_fp8, quantize, quantize_search
from glm_gpu.quant import Format, QuantizedMatrix

# 4 MiB of f32 a block; with its raw bytes, temporaries and result below 15 MB for each thread and block ahead. Four
# times as large is no faster (Xeon with AVX-512, GLM-5.2's experts).
BLOCK_WEIGHTS = 1 << 20
_BF16_INFINITY = np.uint16(0x7F80)


@dataclass
class StageTimes:
    """Seconds and bytes of the stages, added up over threads; safe to add to from any thread.

    Attributes:
        read_s, read_bytes: reading the source.
        quantize_s, quantize_weights: decoding, checking and quantizing; processor seconds.
        write_s, write_bytes: hashing and writing; waiting for blocks not counted.
        wait_s: how long the writer waited for blocks.
    """

    read_s: float = 0.0
    read_bytes: int = 0
    quantize_s: float = 0.0
    quantize_weights: int = 0
    write_s: float = 0.0
    write_bytes: int = 0
    wait_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Add to fields by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


class _Block(NamedTuple):
    """Rows start..stop-1 of the weight that becomes `tensor`."""

    tensor: PlannedTensor
    start: int
    stop: int


class ShardBlocks:
    """What `write_safetensors` needs for one output shard: each tensor's bytes when its turn comes, in order.

    Args:
        checkpoint: the source, with all tensors the shard is made from.
        shard: what to make.
        shapes: of every weight, by name.
        settings: how to round.
        executor: its threads do the work.
        ahead: blocks that may be under way or waiting.
        times: added to.
    """

    def __init__(
        self, checkpoint: Checkpoint, shard: PlannedShard, shapes: Mapping[str, tuple], settings: ConvertSettings,
        executor: Executor, ahead: int, times: StageTimes,
    ) -> None:  # fmt: skip
        self._checkpoint, self._shard, self._shapes = checkpoint, shard, shapes
        self._settings, self._times = settings, times
        self._scales: dict[str, list[np.ndarray]] = {}
        blocks = (block for tensor in shard.tensors if tensor.part == "data" for block in self._blocks(tensor))
        self._results = in_order(executor, self._convert, blocks, ahead)

    def close(self) -> None:
        """Drop what has not begun and wait for the rest; harmless when all is done."""
        self._results.close()

    def entries(self) -> Iterator[tuple]:
        """(name, dtype, shape, data) of each tensor, for `write_safetensors`."""
        for tensor in self._shard.tensors:
            yield (*tensor[:3], partial(self._parts, tensor))

    def _parts(self, tensor: PlannedTensor) -> Iterator[np.ndarray]:
        if tensor.part == "padding":
            yield np.zeros(tensor.shape, np.uint8)
        elif tensor.part == "scales":
            yield from self._scales.pop(tensor.source)
        else:
            for _ in self._blocks(tensor):
                began = time.perf_counter()
                matrix = next(self._results)
                self._times.add(wait_s=time.perf_counter() - began)
                if matrix.scales is not None:
                    self._scales.setdefault(tensor.source, []).append(matrix.scales)
                yield matrix.data

    def _blocks(self, tensor: PlannedTensor) -> Iterator[_Block]:
        shape = self._shapes[tensor.source]
        step = max(1, BLOCK_WEIGHTS // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield _Block(tensor, start, min(start + step, shape[0]))

    def _convert(self, block: _Block) -> QuantizedMatrix:
        name = block.tensor.source
        began = time.perf_counter()
        raw = self._checkpoint.read_rows(name, block.start, block.stop, drop_pages=True)
        read_s = time.perf_counter() - began
        began = time.thread_time()
        values = self._decode(name, raw, block.start)
        try:
            matrix = _quantized(values, block.tensor.format, self._settings)
        except ValueError as error:
            raise CheckpointError(f"tensor {name!r}, counted from row {block.start}: {error}") from None
        self._times.add(
            read_s=read_s,
            read_bytes=raw.nbytes,
            quantize_s=time.thread_time() - began,
            quantize_weights=values.size,
        )
        return matrix

    def _decode(self, name: str, raw: np.ndarray, first_row: int) -> np.ndarray:
        """The numbers of rows as read, [rows, columns] f32; a vector has one column."""
        checkpoint = self._checkpoint
        info = checkpoint.info(name)
        if info.dtype != "F8_E4M3":
            return checkpoint.decode_rows(name, raw, first_row).reshape(len(raw), -1)
        scales = checkpoint.read_f32(name + FP8_SCALE_SUFFIX)
        values = decode_fp8(raw, scales, checkpoint.config.weight_block_size, first_row, info.shape[0])
        checkpoint.check_finite(name, values, first_row)
        return values


def _quantized(values: np.ndarray, format: Format, settings: ConvertSettings) -> QuantizedMatrix:
    if settings.rounding == "search":
        return quantize_search(values, format, settings.scale_dtype)
    matrix = quantize(values, format, settings.scale_dtype)
    if format.name == "bf16" and ((matrix.data & _BF16_INFINITY) == _BF16_INFINITY).any():
        row, column = np.argwhere((matrix.data & _BF16_INFINITY) == _BF16_INFINITY)[0]
        raise ValueError(
            f"weight [{row}, {column}] is {values[row, column]:g}, which bf16 cannot hold; use another width"
        )
    return matrix
