"""What attention remembers of a sequence: for each layer the streams it declares, one row a position."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from glm_gpu.quant import f32_to_bf16


@dataclass(frozen=True)
class CacheLayout:
    """What each layer keeps of a position.

    GLM keeps a `latent` row (kv_lora_rank latent values, then qk_rope_head_dim rope-key values) in every layer and an
    `index_key` row in layers that own an indexer. OLMoE keeps `key` and `value` rows.
    """

    widths: tuple[Mapping[str, int], ...]
    is_bf16: bool

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one position takes over all layers."""
        return sum(sum(streams.values()) for streams in self.widths) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return 2 if self.is_bf16 else 4


class KVCache:
    """One sequence's rows, for up to `max_length` positions.

    Rows are float32, or bfloat16 bit patterns in uint16. The arrays are reserved whole, but the system commits a page
    of them only when it is first written, so a short conversation in a long context costs what it uses.
    """

    def __init__(self, layout: CacheLayout, max_length: int) -> None:
        self.layout = layout
        self.max_length = max_length
        self.length = 0
        dtype = np.uint16 if layout.is_bf16 else np.float32
        self._streams = [
            {name: np.zeros((max_length, width), dtype) for name, width in streams.items()} for streams in layout.widths
        ]

    def write(self, layer: int, stream: str, start: int, values: np.ndarray) -> None:
        """Store rows [start, start + T) of a stream; leaves `length` as it is.

        Args:
            values: [T, width] f32, rounded to nearest even where the cache is bfloat16; or as the cache keeps them.
        """
        stop = start + len(values)
        rows = self._streams[layer][stream]
        assert stop <= self.max_length and values.dtype in (rows.dtype, np.float32)
        rows[start:stop] = values if values.dtype == rows.dtype else f32_to_bf16(values)

    def read(self, layer: int, stream: str, stop: int) -> np.ndarray:
        """Rows [0, stop) of a stream, [stop, width] f32 or uint16; a view, never copies."""
        return self._streams[layer][stream][:stop]

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        assert 0 <= length <= self.length
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes reserved for `max_length` positions."""
        return self.layout.bytes_per_token * self.max_length
