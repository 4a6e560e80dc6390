"""The cost model: seconds of passes, from what they read and multiply and how fast places do that. Pure arithmetic.

A product takes as long as its weights take to come from memory, or as its multiply-adds take, whichever is longer. In
each layer of a pass:

    attention    products of the projections, and the cached positions
    then at once the MLP (dense or shared expert) and the chosen experts that are in memory
                 experts from the disk, each computed when it is there; the last one when all else is done
                 on a device: experts from RAM over PCIe, copied while others compute

so a layer lasts `attention + max(all arithmetic, arrival of the last expert + that expert)`. What arrival costs beyond
the arithmetic is waiting.
"""

from dataclasses import dataclass

import numpy as np

from glm_gpu.predict.parts import Parts

# What a second may be spent on; every second of a pass is one of these.
MEMORY, DEVICE_MEMORY, ARITHMETIC = "memory bandwidth", "device memory bandwidth", "arithmetic"
DISK, COPY, OVERHEAD = "disk", "PCIe", "overhead"
HOST = -1


@dataclass(frozen=True)
class PlaceRates:
    """How fast one place computes: the host on its RAM, or a device on its own memory.

    Attributes:
        weights_gb_s: packed weights that pass through the kernels while rows are few, 10^9 bytes a second; of experts,
            which one call computes together.
        gmac_s: 10^9 multiply-adds a second while rows are many.
        layer_s: seconds of a layer that no weight explains: norms, routing, launches, the interpreter.
        dense_gb_s, dense_gmac_s: the same of matrices that have a call each, and in a prompt all of its rows; those of
            experts when not given.
    """

    weights_gb_s: float
    gmac_s: float = float("inf")
    layer_s: float = 0.0
    dense_gb_s: float | None = None
    dense_gmac_s: float | None = None

    @property
    def dense_b_s(self) -> float:
        """Bytes of single matrices a second."""
        return 1e9 * (self.weights_gb_s if self.dense_gb_s is None else self.dense_gb_s)

    @property
    def dense_macs_s(self) -> float:
        """Multiply-adds with single matrices a second."""
        return 1e9 * (self.gmac_s if self.dense_gmac_s is None else self.dense_gmac_s)


@dataclass(frozen=True)
class Rates:
    """How fast a machine is.

    Attributes:
        host: the CPU's.
        disk_gb_s: whole experts read, as many in flight as do best.
        read_s: how much longer the first expert that a layer reads takes than its bytes do.
        devices: of each device.
        copy_gb_s: from RAM to each device.
        are_misses_computed_on_host: experts that a device lacks are computed by the CPU and not copied.
        are_reads_hidden: a layer computes what it has while it reads; this engine does, not every other.
    """

    host: PlaceRates
    disk_gb_s: float
    read_s: float = 0.0
    devices: tuple[PlaceRates, ...] = ()
    copy_gb_s: tuple[float, ...] = ()
    are_misses_computed_on_host: bool = False
    are_reads_hidden: bool = True


@dataclass(frozen=True)
class Visits:
    """Layers as passes visit them: one entry a layer and pass.

    Attributes:
        layer, rows: [n] int, which layer, and how many rows.
        vram, ram, missing: [n] int, distinct experts that were on the layer's device, in RAM, and on disk.
    """

    layer: np.ndarray
    rows: np.ndarray
    vram: np.ndarray
    ram: np.ndarray
    missing: np.ndarray


@dataclass(frozen=True)
class Cost:
    """Where the seconds go, twice: `phases` by what is done, `limits` by what makes it take that long."""

    phases: dict[str, float]
    limits: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def bottleneck(self) -> str:
        """What most of the time is spent on."""
        return max(self.limits, key=self.limits.__getitem__)

    def scaled(self, factor: float) -> "Cost":
        return Cost(
            {name: seconds * factor for name, seconds in self.phases.items()},
            {name: seconds * factor for name, seconds in self.limits.items()},
        )


def passes_cost(
    parts: Parts,
    rates: Rates,
    places: np.ndarray,
    visits: Visits,
    positions: float,
    num_head_rows: int,
    is_streamed: bool = False,
) -> Cost:
    """What passes cost together.

    Args:
        places: [L] int, the device that holds each layer, or HOST.
        visits: every layer of every pass.
        positions: cached positions that a row finds, on average.
        num_head_rows: rows that logits are made for; the head is at the last layer's place.
        is_streamed: the host's layers are read again in every pass, a layer ahead.
    """
    layer, rows = visits.layer, visits.rows
    place = places[layer]
    on_host = place == HOST
    weights_b_s, macs_s, layer_s, dense_b_s, dense_macs_s = _of_places(rates, place)
    positions = min(positions, parts.most_positions)

    attention_macs = parts.attention_weights[layer] + parts.core_macs * positions
    attention = _product(parts.attention_bytes[layer], attention_macs * rows, dense_b_s, dense_macs_s)
    mlp = _product(parts.mlp_bytes[layer], parts.mlp_weights[layer] * rows, dense_b_s, dense_macs_s)
    distinct = np.maximum(1, visits.vram + visits.ram + visits.missing)
    slab = parts.slab_bytes[layer]
    macs = rows * parts.experts_per_tok / distinct * parts.expert_weights
    expert = _product(slab, macs, weights_b_s, macs_s)
    away = visits.ram + visits.missing
    if rates.are_misses_computed_on_host:
        slow = _product(slab, macs, rates.host.weights_gb_s * 1e9, rates.host.gmac_s * 1e9)
        away_s, copy_s = np.where(on_host, expert.seconds, slow.seconds), np.zeros(len(layer))
    else:
        away_s, copy_s = expert.seconds, np.where(on_host, 0.0, slab / _copy_b_s(rates, place))
    vram_s, ram_s, disk_s = visits.vram * expert.seconds, visits.ram * away_s, visits.missing * away_s

    # a device computes its own part while the host computes what the device lacks
    is_shared_work = rates.are_misses_computed_on_host & ~on_host
    own_s = mlp.seconds + vram_s
    compute_s = np.where(is_shared_work, np.maximum(own_s, ram_s + disk_s), own_s + ram_s + disk_s)
    is_read = visits.missing > 0
    read_s = visits.missing * slab / (rates.disk_gb_s * 1e9) + is_read * rates.read_s
    copies_s = away * copy_s
    arrival_s = np.maximum(copies_s, read_s + is_read * copy_s)
    if rates.are_reads_hidden:
        total_s = np.maximum(compute_s, np.where(arrival_s > 0, arrival_s + away_s, 0.0))
    else:
        total_s = compute_s + arrival_s
    if is_streamed:
        layer_bytes = np.where(on_host, parts.attention_bytes[layer] + parts.mlp_bytes[layer], 0)
        streaming_s = layer_bytes / (rates.disk_gb_s * 1e9) + read_s - attention.seconds - layer_s
        read_s = np.maximum(read_s, streaming_s)
        total_s = np.maximum(total_s, streaming_s)
    wait_s = total_s - compute_s
    waits_for_disk = read_s + is_read * copy_s >= copies_s

    end_rates = rates.devices[places[-1]] if places[-1] != HOST else rates.host
    head_s = num_head_rows * parts.head_bytes / end_rates.dense_b_s
    hidden = compute_s / np.maximum(own_s + ram_s + disk_s, 1e-30)  # what two places do at once counts once
    phases = {
        "attention": attention.seconds.sum(),
        "dense": (mlp.seconds * hidden).sum(),
        "experts in vram": (vram_s * hidden).sum(),
        "experts in ram": (ram_s * hidden).sum(),
        "experts from disk": (disk_s * hidden).sum(),
        "waiting for disk": wait_s[waits_for_disk].sum(),
        "waiting for copies": wait_s[~waits_for_disk].sum(),
        "head": head_s,
        "overhead": layer_s.sum(),
    }
    is_waiting = wait_s > 0
    busy = np.where(is_waiting & rates.are_reads_hidden, 0.0, compute_s)  # what is hidden bounds nothing
    expert_share = 1 - mlp.seconds / np.maximum(own_s + ram_s + disk_s, 1e-30)
    by_weights = attention.weights_share * attention.seconds
    by_weights += busy * (expert.weights_share * expert_share + mlp.weights_share * (1 - expert_share))
    limits = {
        MEMORY: by_weights[on_host].sum() + (head_s if places[-1] == HOST else 0.0),
        DEVICE_MEMORY: by_weights[~on_host].sum() + (head_s if places[-1] != HOST else 0.0),
        ARITHMETIC: (attention.seconds + busy - by_weights).sum(),
        DISK: (total_s - busy)[is_waiting & waits_for_disk].sum(),
        COPY: (total_s - busy)[is_waiting & ~waits_for_disk].sum(),
        OVERHEAD: layer_s.sum(),
    }
    if rates.are_misses_computed_on_host:
        host_s = np.where(is_shared_work & (ram_s + disk_s > own_s), busy, 0.0).sum()
        limits[DEVICE_MEMORY] -= host_s
        limits[MEMORY] += host_s
    return Cost(*({name: float(seconds) for name, seconds in found.items()} for found in (phases, limits)))


@dataclass(frozen=True)
class _Product:
    """Seconds of products, and whether their weights' bytes set them: [n] each."""

    seconds: np.ndarray
    weights_share: np.ndarray


def _product(num_bytes: np.ndarray, macs: np.ndarray, b_s: np.ndarray, macs_s: np.ndarray) -> _Product:
    by_bytes, by_macs = num_bytes / b_s, macs / macs_s
    return _Product(np.maximum(by_bytes, by_macs), (by_bytes >= by_macs).astype(float))


def _of_places(rates: Rates, place_of: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of each visit's place: experts' bytes and multiply-adds a second, seconds a layer, the same two of matrices."""
    rows = [
        (place.weights_gb_s * 1e9, place.gmac_s * 1e9, place.layer_s, place.dense_b_s, place.dense_macs_s)
        for place in (*rates.devices, rates.host)
    ]
    table = np.array(rows)
    return tuple(table[place_of].T)  # HOST, -1, is the last row


def _copy_b_s(rates: Rates, place: np.ndarray) -> np.ndarray:
    return np.array([*rates.copy_gb_s, np.inf])[place] * 1e9
