"""The plan: where every byte will live, decided before the first one moves. Pure: numbers in, a placement out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glm_gpu.errors import CapacityError
from glm_gpu.tiers.budget import Budget
from glm_gpu.tiers.device_plan import DevicePlan, plan_devices
from glm_gpu.tiers.files import ReadMode
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.placement import TIERS, expected_uses, least_slots, place, slots_by_heat
from glm_gpu.tiers.sizes import ModelSizes
from glm_gpu.units import format_bytes

# A context that nobody asked for may be cut down to this before dense layers are streamed.
MIN_DEFAULT_CONTEXT = 1024
# Of the slots of each size so many hold hot experts that stay; the others follow what the text needs. On the demo's
# traces a quarter, chosen anew every 16 passes, costs 0.1 points of hit rate; every 64 passes 0.4, and a half then 1.
PINNED_SHARE = 0.25
# `StreamedLayers` holds so many layers at once.
_STREAMED_LAYERS = 3
# Buffered reads pay when the page cache can hold this share of the experts that are not in slots.
_BUFFERED_SHARE = 0.5


@dataclass(frozen=True)
class Demand:
    """What is to be planned for, apart from the model's own sizes.

    Attributes:
        context: positions of the cache: as asked, or the most that makes sense when `is_context_asked` is False.
        cache_bytes_per_token: [L], of each layer.
        num_contexts: caches of that many positions, shared by all sequences.
        device_pass_bytes: the most a pass takes on a device, given the context; None where everything is computed on
            the host. With it every layer must have a device.
        pass_bytes: the most a pass takes beside weights and cache, given the context.
        num_read_threads: reads in flight at once.
        expert_slots: at most so many slots, over all slab sizes; None for as many as fit.
        read_mode: how experts are read; "auto" leaves it to the plan.
    """

    context: int
    is_context_asked: bool
    cache_bytes_per_token: tuple[int, ...]
    pass_bytes: Callable[[int], int]
    num_read_threads: int = 4
    expert_slots: int | None = None
    read_mode: ReadMode | Literal["auto"] = "auto"
    num_contexts: int = 1
    device_pass_bytes: Callable[[int], int] | None = None


@dataclass(frozen=True)
class TierPlan:
    """One tier of TIERS: its experts, their bytes, and the share of all uses that heat expects them to serve."""

    name: str
    num_experts: int
    nbytes: int
    heat_share: float


@dataclass(frozen=True)
class Plan:
    """Where everything lives. The store and the engine are built from it.

    Attributes:
        budget: what may be used, and why no more.
        is_streamed: dense layers do not fit and are read in every pass.
        context: positions that a session can hold.
        base_bytes: what the process held before anything was loaded.
        dense_bytes: weights that stay in memory, experts apart.
        cache_bytes, pass_bytes, read_bytes: all full caches, the largest pass, buffers of the reading threads.
        num_slots: slots in RAM by their size in bytes.
        num_pinned: how many of them hold hot experts that stay.
        lock_bytes: as much of those as may be locked in memory.
        read_mode: how experts are read.
        placement: [L, E] uint8, the tier each expert begins in, an index into TIERS; 255 in layers without experts.
        tiers: what each tier comes to, hottest first; tiers without experts are left out.
        devices: one plan a device.
        reasons: why the plan is as it is, one line each.
    """

    budget: Budget
    is_streamed: bool
    context: int
    base_bytes: int
    dense_bytes: int
    cache_bytes: int
    pass_bytes: int
    read_bytes: int
    num_slots: dict[int, int]
    num_pinned: dict[int, int]
    lock_bytes: int
    read_mode: ReadMode
    placement: np.ndarray
    tiers: tuple[TierPlan, ...]
    devices: tuple[DevicePlan, ...]
    reasons: tuple[str, ...]

    @property
    def slot_bytes(self) -> int:
        """Memory of all slots in RAM."""
        return sum(size * count for size, count in self.num_slots.items())

    @property
    def ram_bytes(self) -> int:
        """Everything this process will hold in RAM at its peak."""
        kept = self.base_bytes + self.dense_bytes + self.cache_bytes + self.pass_bytes + self.read_bytes
        return kept + self.slot_bytes


def make_plan(sizes: ModelSizes, budget: Budget, demand: Demand, heat: Heat | None = None) -> Plan:
    """Place a model within a budget.

    First what a pass cannot do without: what the process holds, dense weights, cache, the largest pass, buffers of
    reading threads, and slots for one layer's experts of one token. What is left becomes slots, for the experts that
    heat finds worth most for their bytes; without heat all are equal. While context and streaming stay the same, more
    memory never leads to fewer slots.

    Raises:
        CapacityError: not even the least of that fits; the message holds the numbers.
        RequestError: fewer `expert_slots` than slab sizes.
    """
    uses = expected_uses(sizes, heat)
    floor = _fit(sizes, budget, demand, uses)
    reasons = list(floor.reasons)
    room = budget.ram_bytes - floor.kept_bytes
    num_slots = slots_by_heat(sizes, uses, floor.is_on_device, room, demand.expert_slots)
    num_pinned = {size: int(count * PINNED_SHARE) for size, count in num_slots.items()}
    pinned_bytes = _total(num_pinned)
    lock_bytes = pinned_bytes if budget.memlock_bytes is None else min(pinned_bytes, budget.memlock_bytes)
    if lock_bytes < pinned_bytes:
        reasons.append(
            f"{format_bytes(lock_bytes)} of {format_bytes(pinned_bytes)} of hot experts may be locked in memory; raise "
            "the limit with `ulimit -l` or LimitMEMLOCK"
        )
    num_locked = _within(num_pinned, lock_bytes)
    spare_bytes = budget.spare_bytes + room - _total(num_slots)
    on_devices = sum(device.expert_bytes for device in floor.devices)
    missing_bytes = max(0, sum(sizes.slot_nbytes) * sizes.num_experts - on_devices - _total(num_slots))
    read_mode, reason = _read_mode(missing_bytes, spare_bytes, demand.read_mode)
    cached_bytes = spare_bytes if read_mode == "buffered" else 0
    if demand.device_pass_bytes is not None:
        num_placed = int(floor.is_on_device.sum()) + sum(num_slots.values())
        is_complete = num_placed >= len(sizes.sparse_layers) * sizes.num_experts
        reasons.append(
            "every expert is in VRAM or host memory: a decode step is one graph a device if pinned memory can be read"
            if is_complete
            else "some experts are on disk: the host waits once a layer for the router's choice"
        )
    placement = place(sizes, uses, floor.is_on_device, num_slots, num_locked, cached_bytes)
    return Plan(
        budget=budget,
        is_streamed=floor.is_streamed,
        context=floor.context,
        base_bytes=budget.base_bytes,
        dense_bytes=floor.dense_bytes,
        cache_bytes=floor.cache_bytes,
        pass_bytes=floor.pass_bytes,
        read_bytes=floor.read_bytes,
        num_slots=num_slots,
        num_pinned=num_pinned,
        lock_bytes=lock_bytes,
        read_mode=read_mode,
        placement=placement,
        tiers=_tiers(sizes, uses, placement),
        devices=floor.devices,
        reasons=(*reasons, reason),
    )


@dataclass(frozen=True)
class _Floor:
    """One way to hold everything but the slots."""

    is_streamed: bool
    context: int
    base_bytes: int
    dense_bytes: int
    cache_bytes: int
    pass_bytes: int
    read_bytes: int
    load_bytes: int
    least_slot_bytes: int
    devices: tuple[DevicePlan, ...]
    is_on_device: np.ndarray
    is_placed: bool
    reasons: tuple[str, ...]

    @property
    def kept_bytes(self) -> int:
        return self.base_bytes + self.dense_bytes + self.cache_bytes + self.pass_bytes + self.read_bytes

    @property
    def least_bytes(self) -> int:
        """What it takes at the least, while weights are loaded and afterwards."""
        return max(self.kept_bytes + self.least_slot_bytes, self.base_bytes + self.dense_bytes + self.load_bytes)


def _fit(sizes: ModelSizes, budget: Budget, demand: Demand, uses: np.ndarray) -> _Floor:
    """The first way that fits: as asked, or with a shorter context if none was asked for, or with streamed layers."""
    smallest = None
    for is_streamed in (False, True) if demand.device_pass_bytes is None else (False,):
        for context in _contexts(demand):
            floor = _floor(sizes, budget, demand, uses, context, is_streamed)
            if floor.least_bytes <= budget.ram_bytes and floor.is_placed:
                return floor
            if smallest is None or floor.least_bytes < smallest.least_bytes:
                smallest = floor
    assert smallest is not None
    if not smallest.is_placed:
        raise _unplaced(sizes, budget, smallest, demand.device_pass_bytes(smallest.context))
    raise CapacityError(
        f"the model needs at least {format_bytes(smallest.least_bytes)} and {format_bytes(budget.ram_bytes)} may be "
        f"used ({budget.reason}): weights {format_bytes(smallest.dense_bytes)}, cache of {smallest.context} positions "
        f"{format_bytes(smallest.cache_bytes)}, the largest pass {format_bytes(smallest.pass_bytes)}, the experts of a "
        f"layer {format_bytes(smallest.least_slot_bytes + smallest.read_bytes)}, loading "
        f"{format_bytes(smallest.load_bytes)}, the program {format_bytes(smallest.base_bytes)}; give a shorter "
        "--context, fewer --dense-bits, or more memory"
    )


def _unplaced(sizes: ModelSizes, budget: Budget, floor: _Floor, pass_bytes: int) -> CapacityError:
    devices = ", ".join(f"{device.name} {format_bytes(device.free_bytes)}" for device in budget.devices)
    cache_bytes = floor.cache_bytes + sum(device.cache_bytes for device in floor.devices)
    return CapacityError(
        f"the GPUs cannot hold what every token needs: weights {format_bytes(sizes.dense_bytes)}, cache of "
        f"{floor.context} positions {format_bytes(cache_bytes)}, on each {format_bytes(pass_bytes)} for the largest "
        f"pass, and two experts; free are {devices}; give a shorter --context, fewer --dense-bits, or --device cpu"
    )


def _contexts(demand: Demand) -> Iterator[int]:
    context = demand.context
    yield context
    while not demand.is_context_asked and context > MIN_DEFAULT_CONTEXT:
        context = max(MIN_DEFAULT_CONTEXT, context // 2)
        yield context


def _floor(
    sizes: ModelSizes, budget: Budget, demand: Demand, uses: np.ndarray, context: int, is_streamed: bool
) -> _Floor:
    reasons = []
    pass_bytes = demand.pass_bytes(context)
    layer_cache_bytes = [demand.num_contexts * context * nbytes for nbytes in demand.cache_bytes_per_token]
    device_pass_bytes = pass_bytes if demand.device_pass_bytes is None else demand.device_pass_bytes(context)
    devices, is_on_device = plan_devices(budget.devices, sizes, uses, layer_cache_bytes, device_pass_bytes)
    is_placed = demand.device_pass_bytes is None or _is_placed(sizes, devices)
    dense_bytes = sizes.dense_bytes - sum(device.dense_bytes for device in devices)
    load_bytes = max(sizes.end_load_bytes, sizes.layer_load_bytes)
    if any(device.layers for device in devices):  # a layer is whole on the host before it goes up
        load_bytes += max(sizes.end_bytes, *sizes.layer_bytes)
    if is_streamed:
        trunk, draft = sizes.layer_bytes[:-1], sizes.layer_bytes[-1]
        dense_bytes = sizes.end_bytes + draft + min(_STREAMED_LAYERS, len(trunk)) * max(trunk)
        pass_bytes += sizes.layer_load_bytes
        reasons.append("dense weights do not fit: layers are read again in every pass")
    if context < demand.context:
        reasons.append(f"the context is cut from {demand.context} to {context} positions to fit")
    return _Floor(
        is_streamed,
        context,
        budget.base_bytes,
        dense_bytes,
        sum(layer_cache_bytes) - sum(device.cache_bytes for device in devices),
        pass_bytes,
        demand.num_read_threads * sizes.read_bytes,
        load_bytes,
        _total(least_slots(sizes, demand.expert_slots)),
        devices,
        is_on_device,
        is_placed,
        tuple(reasons),
    )


def _is_placed(sizes: ModelSizes, devices: tuple[DevicePlan, ...]) -> bool:
    """Whether devices hold every layer and the ends, and each has room for two experts of a size at least."""
    num_layers = sum(len(device.layers) for device in devices)
    has_room = all(count >= 2 for device in devices for count in device.num_slots.values())
    return num_layers == len(sizes.layer_bytes) and any(device.has_ends for device in devices) and has_room


def _read_mode(missing_bytes: int, spare_bytes: int, asked: ReadMode | Literal["auto"]) -> tuple[ReadMode, str]:
    if asked != "auto":
        return asked, f"reads are {asked}, as asked"
    if missing_bytes == 0:
        return "buffered", "every expert has a slot and is read once"
    spare = f"{format_bytes(spare_bytes)} of page cache for {format_bytes(missing_bytes)} of experts without a slot"
    if spare_bytes >= missing_bytes * _BUFFERED_SHARE:
        return "buffered", f"reads are buffered: {spare}"
    return "direct", f"reads are direct: only {spare}"


def _tiers(sizes: ModelSizes, uses: np.ndarray, placement: np.ndarray) -> tuple[TierPlan, ...]:
    nbytes = np.array(sizes.slab_nbytes, np.int64)
    tiers = []
    for code, name in enumerate(TIERS):
        members = placement == code
        if members.any():
            share = float(uses[members].sum() / uses.sum())
            tiers.append(TierPlan(name, int(members.sum()), int(members.sum(axis=1) @ nbytes), share))
    return tuple(tiers)


def _within(counts: dict[int, int], num_bytes: int) -> dict[int, int]:
    """As many of the counted slots as fit, the small ones first."""
    result = {}
    for size, count in sorted(counts.items()):
        result[size] = min(count, num_bytes // size)
        num_bytes -= result[size] * size
    return result


def _total(counts: dict[int, int]) -> int:
    return sum(size * count for size, count in counts.items())
