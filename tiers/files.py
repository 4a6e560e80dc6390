"""Experts on disk: where each one's bytes lie, and how they get into a slab."""

import errno
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.errors import CheckpointError
from glm_gpu.recipe import Recipe
from glm_gpu.slab import SlabLayout
from glm_gpu.stored import SCALES_SUFFIX
from glm_gpu.tiers.expert import PROJECTIONS, expert_layout, expert_tensor, read_expert

ReadMode = Literal["direct", "buffered"]

log = logging.getLogger(__name__)

# Direct reads need offset, length and memory aligned to the device's logical block; 4096 covers all that are sold.
DIRECT_ALIGNMENT = 4096


@dataclass(frozen=True)
class Run:
    """An expert's bytes as one range of a file, in the order of its slab."""

    shard: Path
    begin: int
    nbytes: int


class ExpertFiles:
    """Reads experts into slabs, from any number of threads.

    An expert that lies in one run, in the format its slab has, is one read. Others are read tensor by tensor, and
    quantized here where they are stored as plain numbers.

    Args:
        layers: the sparse layers that may be read.
        mode: "direct" bypasses the page cache wherever the file system allows it.
        preadv: for tests that inject faults.

    Attributes:
        bytes_read: so far, alignment included.
        buffered_shards: files on which direct reads were refused, by the reason.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        layers: Sequence[int],
        mode: ReadMode = "buffered",
        preadv: Callable = os.preadv,
    ) -> None:
        self._checkpoint, self._rounding = checkpoint, recipe.rounding
        self._layouts = {layer: expert_layout(checkpoint, recipe, layer) for layer in layers}
        self._mode = mode
        self._preadv = preadv
        self._descriptors: dict[tuple[Path, ReadMode], int] = {}
        self._lock = threading.Lock()
        self._bounce = threading.local()
        self.bytes_read = 0
        self.buffered_shards: dict[Path, str] = {}

    @property
    def fingerprint(self) -> str:
        """The checkpoint's."""
        return self._checkpoint.fingerprint

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self._checkpoint.config.n_routed_experts

    @property
    def layers(self) -> list[int]:
        """The layers that may be read, ascending."""
        return sorted(self._layouts)

    def layout(self, layer: int) -> SlabLayout:
        """How the layer's slabs are laid out."""
        return self._layouts[layer]

    def close(self) -> None:
        """Close the files that this object opened; the checkpoint stays open."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def run(self, layer: int, expert: int) -> Run | None:
        """The expert's range of bytes; None where it lies in pieces or in another format."""
        names = [expert_tensor(layer, expert, projection) for projection in PROJECTIONS]
        if self._checkpoint.stored(names[0]) is None or not self._layouts[layer].format.is_packed:
            return None
        parts = [self._checkpoint.info(name) for name in (*names, *(name + SCALES_SUFFIX for name in names))]
        for before, after in itertools.pairwise(parts):
            if after.shard != before.shard or after.begin != before.end:
                return None
        return Run(parts[0].shard, parts[0].begin, parts[-1].end - parts[0].begin)

    def read(self, layer: int, expert: int, slot: np.ndarray) -> None:
        """Fill a slot with an expert.

        Args:
            slot: [layout.aligned_nbytes] uint8, on a page boundary; its first layout.nbytes are overwritten, and the
                rest may be.

        Raises:
            CheckpointError: the bytes cannot be read; the slot then holds nothing of use.
        """
        layout = self._layouts[layer]
        run = self.run(layer, expert)
        if run is None:
            read_expert(self._checkpoint, layout, layer, expert, slot[: layout.nbytes], self._rounding)
            self._count(layout.nbytes)
            return
        assert run.nbytes == layout.nbytes, (run, layout)
        try:
            if self._mode == "direct" and run.shard not in self.buffered_shards and self._read_direct(run, slot):
                return
            self._read_buffered(run, slot[: run.nbytes], 0)
        except OSError as error:
            raise CheckpointError(
                f"{run.shard}: expert {expert} of layer {layer} cannot be read ({error.strerror}); check the disk"
            ) from None

    def _read_direct(self, run: Run, slot: np.ndarray) -> bool:
        """Read past the page cache. False, with the reason noted, where the file system refuses."""
        begin = run.begin // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        nbytes = -(-(run.begin + run.nbytes - begin) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        target = slot if begin == run.begin and len(slot) >= nbytes else self._bounce_buffer(nbytes)
        skip = run.begin - begin
        try:
            descriptor = self._descriptor(run.shard, "direct")
            done = 0
            while done < skip + run.nbytes:
                count = self._preadv(descriptor, [target[done:nbytes]], begin + done)
                self._count(count)
                done += count
                if done % DIRECT_ALIGNMENT or not count:  # the end of the file, or a short read: finish it buffered
                    break
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            with self._lock:
                if run.shard not in self.buffered_shards:
                    self.buffered_shards[run.shard] = error.strerror
                    log.warning("%s: direct reads are refused (%s); reading through the page cache", run.shard, error)
            return False
        copied = max(0, min(done - skip, run.nbytes))
        if target is not slot:
            slot[:copied] = target[skip : skip + copied]
        if copied < run.nbytes:
            self._read_buffered(run, slot[: run.nbytes], copied)
        return True

    def _read_buffered(self, run: Run, slab: np.ndarray, done: int) -> None:
        descriptor = self._descriptor(run.shard, "buffered")
        while done < run.nbytes:
            count = self._preadv(descriptor, [slab[done:]], run.begin + done)
            if count == 0:
                raise CheckpointError(
                    f"{run.shard}: ends {run.nbytes - done} bytes early; the file was changed while it was in use, "
                    "fetch it again"
                )
            self._count(count)
            done += count

    def _descriptor(self, shard: Path, mode: ReadMode) -> int:
        with self._lock:
            if (shard, mode) not in self._descriptors:
                flags = os.O_RDONLY | (os.O_DIRECT if mode == "direct" else 0)
                self._descriptors[shard, mode] = os.open(shard, flags)
            return self._descriptors[shard, mode]

    def _bounce_buffer(self, nbytes: int) -> np.ndarray:
        """This thread's page-aligned buffer of at least so many bytes."""
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._bounce.buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return buffer

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_read += num_bytes
