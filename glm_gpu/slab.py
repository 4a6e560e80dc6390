"""SlabLayout: where the three matrices of one routed expert lie in one run of bytes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from glm_gpu.quant import PLAIN_DTYPES, Format, QuantizedMatrix

SLAB_ALIGNMENT = 4096
ROLES = ("gate", "up", "down")
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class SlabLayout:
    """The bytes of one expert: [gate, up, down, gate.qs, up.qs, down.qs], each right behind the one before.

    The same run as in the container, so a slab is one read. Formats without scales have only the first three parts.
    Nothing is padded: at odd sizes the scales may lie at any byte, so readers of a slab use unaligned loads.

    Attributes:
        format: of all three matrices.
        hidden: D, in-features of gate and up.
        width: F, in-features of down.
        scale_dtype: float32 or float16.
    """

    format: Format
    hidden: int
    width: int
    scale_dtype: np.dtype = F32

    def __post_init__(self):
        object.__setattr__(self, "scale_dtype", np.dtype(self.scale_dtype))

    def shape(self, role: str) -> tuple[int, int]:
        """(O, I) of "gate", "up" or "down"."""
        return (self.hidden, self.width) if role == "down" else (self.width, self.hidden)

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Byte range (begin, end) of each part, in order: "gate", "up", "down", "gate.qs", "up.qs", "down.qs"."""
        sizes = {role: self.format.data_nbytes(*self.shape(role)) for role in ROLES}
        if self.format.is_packed:
            for role in ROLES:
                sizes[f"{role}.qs"] = self.format.scale_count(*self.shape(role)) * self.scale_dtype.itemsize
        parts = {}
        end = 0
        for name, size in sizes.items():
            parts[name] = (end, end + size)
            end += size
        return parts

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one expert, as stored."""
        return list(self.parts.values())[-1][1]

    @cached_property
    def aligned_nbytes(self) -> int:
        """`nbytes` rounded up to whole pages of 4096 bytes: what a slot takes."""
        return -(-self.nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT

    def views(self, slab: np.ndarray) -> tuple[QuantizedMatrix, QuantizedMatrix, QuantizedMatrix]:
        """(gate, up, down) as views of a slab; never copies.

        Args:
            slab: [at least nbytes] uint8, contiguous.
        """
        assert slab.dtype == np.uint8 and slab.ndim == 1 and len(slab) >= self.nbytes, (slab.dtype, slab.shape)
        return tuple(self._view(slab, role) for role in ROLES)

    def _view(self, slab: np.ndarray, role: str) -> QuantizedMatrix:
        shape = self.shape(role)
        begin, end = self.parts[role]
        dtype = np.dtype(np.uint8) if self.format.is_packed else PLAIN_DTYPES[self.format.name]
        data = slab[begin:end].view(dtype).reshape(shape[0], -1)
        if not self.format.is_packed:
            return QuantizedMatrix(self.format, shape, data)
        begin, end = self.parts[f"{role}.qs"]
        scales = slab[begin:end].view(self.scale_dtype).reshape(shape[0], -1)
        return QuantizedMatrix(self.format, shape, data, scales)
