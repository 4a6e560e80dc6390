"""How fast this machine is, measured in a few seconds with the kernels that a model will run."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from glm_gpu.kernels.experts import expert_ffn, mlp
from glm_gpu.predict.cost import PlaceRates, Rates
from glm_gpu.predict.engines import GLM_GPU
from glm_gpu.slab import SlabLayout
from glm_gpu.state import read_state, write_state
from glm_gpu.tiers.read_bench import ReadRate
from glm_gpu.tiers.slots import slot_memory

log = logging.getLogger(__name__)

_KIND, _VERSION = "rates", 2
_NAMES = ("weights_gb_s", "gmac_s", "disk_gb_s", "dense_gb_s", "dense_gmac_s", "read_s", "layer_s")
_MEASURE_S = 0.5
# Larger than a desktop's last-level cache, so that weights come from memory.
_WEIGHTS_BYTES = 256 << 20
_MOST_SLABS = 256
_EXPERTS_PER_TOK = 8
# Rows of a prefill pass, and those of them that an expert has in GLM-5.2: each row chooses 8 of 256.
_ROWS, _ROWS_PER_EXPERT = 512, 16


def measure_host(layout: SlabLayout, activations: str) -> PlaceRates:
    """What the kernels get through on this machine, with experts of random weights: medians over half a second.

    Args:
        layout: of a model's experts.
        activations: what products round their inputs to.
    """
    rng = np.random.default_rng(0)
    slabs = _random_slabs(layout, rng)
    one = rng.standard_normal((1, layout.hidden)).astype(np.float32)
    weights = np.full((1, _EXPERTS_PER_TOK), 0.125, np.float32)
    starts = iter(range(1 << 30))

    def decode() -> None:
        first = next(starts) * _EXPERTS_PER_TOK
        choice = (first + np.arange(_EXPERTS_PER_TOK, dtype=np.int32)) % len(slabs)
        expert_ffn(one, slabs, layout, choice[None], weights, activations)

    def decode_alone() -> None:
        mlp(one, *layout.views(slabs[next(starts) % len(slabs)]), activations)

    num_rows = len(slabs) * _ROWS_PER_EXPERT // _EXPERTS_PER_TOK
    many = rng.standard_normal((num_rows, layout.hidden)).astype(np.float32)
    choice = (np.arange(num_rows * _EXPERTS_PER_TOK, dtype=np.int32) % len(slabs)).reshape(num_rows, -1)
    evenly = np.repeat(weights, num_rows, axis=0)
    decode_s = _median_s(decode)
    prefill_s = _median_s(lambda: expert_ffn(many, slabs, layout, choice, evenly, activations))
    prompt = rng.standard_normal((_ROWS, layout.hidden)).astype(np.float32)
    dense_s = _median_s(lambda: mlp(prompt, *layout.views(slabs[next(starts) % len(slabs)]), activations))
    macs = choice.size * 3 * layout.hidden * layout.width
    return PlaceRates(
        _EXPERTS_PER_TOK * layout.nbytes / decode_s / 1e9,
        macs / prefill_s / 1e9,
        GLM_GPU.layer_s,
        layout.nbytes / _median_s(decode_alone) / 1e9,
        _ROWS * 3 * layout.hidden * layout.width / dense_s / 1e9,
    )


def disk_rates(rows: Sequence[ReadRate], expert_bytes: int) -> tuple[float, float] | None:
    """(GB/s of reads that do best, seconds that a lone one takes longer) of `read_bench.measure_reads`.

    None when no row is the disk's.
    """
    found = [row for row in rows if row.is_disk]
    if not found:
        return None
    best = max(found, key=lambda row: row.gb_s)
    alone = max((row.gb_s for row in found if row.depth == 1), default=best.gb_s)
    return best.gb_s, max(0.0, expert_bytes / alone / 1e9 - expert_bytes / best.gb_s / 1e9)


def load_rates(folder: Path | None) -> Rates | None:
    """What was measured on this machine before; None when nothing was."""
    content = None if folder is None else read_state(folder / "rates", _KIND, _VERSION)
    if content is None:
        return None
    header, _ = content
    found = [header.get(name) for name in _NAMES]
    if not all(isinstance(rate, int | float) and 0 <= rate < 1e6 for rate in found) or not all(found[:5]):
        log.warning("%s: not used (%.80r are no rates); measure again with --measure", folder / "rates", found)
        return None
    weights_gb_s, gmac_s, disk_gb_s, dense_gb_s, dense_gmac_s, read_s, layer_s = map(float, found)
    return Rates(PlaceRates(weights_gb_s, gmac_s, layer_s, dense_gb_s, dense_gmac_s), disk_gb_s, read_s)


def save_rates(folder: Path, rates: Rates) -> None:
    """Keep measured rates for later plans.

    Raises:
        OSError: the folder cannot be written.
    """
    host = rates.host
    dense = host.dense_b_s / 1e9, host.dense_macs_s / 1e9
    values = (host.weights_gb_s, host.gmac_s, rates.disk_gb_s, *dense, rates.read_s, host.layer_s)
    write_state(folder / "rates", _KIND, _VERSION, dict(zip(_NAMES, values, strict=True)), {})


def _random_slabs(layout: SlabLayout, rng: np.random.Generator) -> list[np.ndarray]:
    """Experts of random bytes in memory like slots': as many as exceed the caches, at least those of a token."""
    count = min(_MOST_SLABS, max(_EXPERTS_PER_TOK, -(-_WEIGHTS_BYTES // layout.nbytes)))
    arena = np.frombuffer(slot_memory(count * layout.aligned_nbytes, layout.aligned_nbytes), np.uint8)
    slabs = [slot[: layout.nbytes] for slot in arena.reshape(count, -1)]
    for slab in slabs:
        slab[...] = rng.integers(0, 256, layout.nbytes, np.uint8)
        for view in layout.views(slab):
            if view.scales is not None:
                view.scales[...] = 0.01
            elif view.data.dtype.kind == "f":
                view.data[...] = 0.01
    return slabs


def _median_s(call: Callable[[], None]) -> float:
    end, times = time.perf_counter() + _MEASURE_S, []
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
