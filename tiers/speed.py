"""What speed to expect of a plan, from what memory and disk of this machine can do."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm_gpu.state import read_state, write_state
from glm_gpu.tiers.plan import Plan
from glm_gpu.tiers.sizes import ModelSizes

log = logging.getLogger(__name__)

_KIND, _VERSION = "rates", 1
# Larger than any cache of a desktop, so that memory is what is measured.
_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True)
class Rates:
    """Measured bandwidths, 10^9 bytes a second; `disk_gb_s` is that of whole experts, several in flight."""

    memory_gb_s: float
    disk_gb_s: float


@dataclass(frozen=True)
class Speed:
    """One decoded token: bytes it takes from memory and from disk, and how long that is."""

    memory_bytes: float
    disk_bytes: float
    memory_s: float
    disk_s: float

    @property
    def tok_s(self) -> float:
        """Tokens a second if reading hides behind computing, or the other way round, as well as it can."""
        return 1 / max(self.memory_s, self.disk_s)


def expected_speed(plan: Plan, sizes: ModelSizes, rates: Rates) -> Speed:
    """How fast a plan decodes: every dense weight and each layer's chosen experts are read from memory once a token.

    Experts of tiers that heat expects to be asked for come from the disk, as do dense layers that are streamed. The
    embedding's rows are left out, being few.
    """
    shares = {tier.name: tier.heat_share for tier in plan.tiers}
    layer_bytes = sum(sizes.layer_bytes)
    chosen_bytes = sum(sizes.slab_nbytes) * sizes.experts_per_tok
    memory_bytes = layer_bytes + sizes.end_bytes / 2 + chosen_bytes
    disk_bytes = chosen_bytes * shares.get("disk", 0.0) + layer_bytes * plan.is_streamed
    return Speed(
        memory_bytes,
        disk_bytes,
        memory_bytes / rates.memory_gb_s / 1e9,
        disk_bytes / rates.disk_gb_s / 1e9,
    )


def measure_memory(num_threads: int) -> float:
    """GB/s that so many threads read from memory together."""
    arrays = [np.ones(_MEMORY_BYTES // num_threads // 8) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.sum, arrays))
            best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - began) / 1e9)
    return best


def load_rates(folder: Path | None) -> Rates | None:
    """What was measured on this machine before; None when nothing was."""
    content = None if folder is None else read_state(folder / "rates", _KIND, _VERSION)
    if content is None:
        return None
    header, _ = content
    rates = header.get("memory_gb_s"), header.get("disk_gb_s")
    if not all(isinstance(rate, int | float) and 0 < rate < 1e6 for rate in rates):
        log.warning("%s: not used (%.80r are no rates); measuring afresh", folder / "rates", rates)
        return None
    return Rates(*map(float, rates))


def save_rates(folder: Path, rates: Rates) -> None:
    """Keep measured rates for later plans.

    Raises:
        OSError: the folder cannot be written.
    """
    write_state(folder / "rates", _KIND, _VERSION, {"memory_gb_s": rates.memory_gb_s, "disk_gb_s": rates.disk_gb_s}, {})


def disk_rate(rows: Sequence) -> float | None:
    """The best rate of `read_bench.measure_reads` that is the disk's; None when none is."""
    return max((row.gb_s for row in rows if row.is_disk), default=None)
