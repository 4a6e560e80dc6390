"""The link between a device and pinned host memory: whether experts are copied over it or read in place."""

from dataclasses import dataclass

# A host that waits for the router's choice once a layer costs about this much a layer: the event, a look at the choice,
# and kernels that are queued late. Public figures of CUDA's event and launch latencies; `bench/gpu.py` measures it.
HOST_WAIT_S = 30e-6


@dataclass(frozen=True)
class LinkRates:
    """Measured rates of one device's link, bytes a second.

    Attributes:
        copy_bytes_s: of copies from pinned memory.
        mapped_bytes_s: of kernels that read pinned memory themselves.
    """

    copy_bytes_s: float
    mapped_bytes_s: float


def reads_in_place(link: LinkRates, missed_bytes: float, num_layers: int) -> bool:
    """Whether a step is faster when kernels read experts in pinned memory themselves than with copies.

    Copies go at their rate, and the host has to see each layer's choice; reads in place go at theirs, with no host.

    Args:
        missed_bytes: of the experts outside VRAM that a step is expected to use.
        num_layers: with experts, on the device.
    """
    return missed_bytes / link.mapped_bytes_s <= missed_bytes / link.copy_bytes_s + num_layers * HOST_WAIT_S
