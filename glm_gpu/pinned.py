"""Host memory registered with the driver, so that copies to a device run at the link's speed beside other work.

In chunks, since systems bound how much may be registered at once (WDDM), in all (RLIMIT_MEMLOCK), or refuse by chance.
What is refused stays pageable: copies from there are slower, and everything still works.
"""

import logging
from collections.abc import Sequence

import numpy as np

from glm_gpu.device import Device
from glm_gpu.units import format_bytes

log = logging.getLogger(__name__)

# Large enough that registering 100 GiB takes few calls; a refusal loses at most MIN_CHUNK_BYTES of what would fit.
CHUNK_BYTES = 1 << 30
MIN_CHUNK_BYTES = 16 << 20


class PinnedRange:
    """The front of an array of the host, registered as far as the system allows.

    Args:
        memory: [n] uint8; must outlive this object's `close`.
        num_bytes: so much of it at most.
        device: through which to register; the pages are then good for all devices of the process.

    Attributes:
        num_bytes: what is registered, from the front.
    """

    def __init__(self, device: Device, memory: np.ndarray, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunks: list[np.ndarray] = []
        self.num_bytes = 0
        wanted = min(num_bytes, memory.nbytes)
        size = chunk_bytes
        smallest = min(chunk_bytes, MIN_CHUNK_BYTES)
        while self.num_bytes < wanted:
            chunk = memory[self.num_bytes : min(wanted, self.num_bytes + size)]
            if device.register(chunk):
                self._chunks.append(chunk)
                self.num_bytes += chunk.nbytes
            elif size > smallest:
                size = max(smallest, size // 2)
            else:
                break
        self.lost_bytes = wanted - self.num_bytes

    def close(self) -> None:
        """Let the pages go. Harmless when repeated."""
        for chunk in self._chunks:
            self._device.unregister(chunk)
        self._chunks.clear()
        self.num_bytes = 0


def pin(
    device: Device, memories: Sequence[np.ndarray], num_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> list[PinnedRange]:
    """Register several arrays, in order, up to a number of bytes in all; what was lost is said once."""
    ranges = []
    for memory in memories:
        ranges.append(PinnedRange(device, memory, num_bytes, chunk_bytes))
        num_bytes -= min(num_bytes, memory.nbytes)
    lost_bytes = sum(each.lost_bytes for each in ranges)
    if lost_bytes:
        log.warning(
            "%s of expert slots could not be page-locked; copies from there to the GPU are slower. Raise the limit "
            "with `ulimit -l` or LimitMEMLOCK",
            format_bytes(lost_bytes),
        )
    return ranges
