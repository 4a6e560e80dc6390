"""Which layers each device holds, and how many of their experts: by its own free memory, whatever the others have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_gpu.tiers.budget import DeviceBudget
from glm_gpu.tiers.placement import hottest_first
from glm_gpu.tiers.sizes import ModelSizes

# A pass of many rows uses most experts once: those that are not on the device go through so many slots in turn.
MAX_TRANSIT = 16


@dataclass(frozen=True)
class DevicePlan:
    """One device's part: whole layers with their caches, and the hottest of their experts.

    Attributes:
        name, free_bytes: the device and what it may be filled with.
        layers: their numbers, consecutive; none on a device too small for one.
        has_ends: whether embeddings, head and final norm are here.
        dense_bytes, cache_bytes, pass_bytes: weights without experts, caches of the layers, the largest pass.
        num_experts, expert_bytes: experts held here.
        num_slots: places by their size in bytes: for those experts, and for transit.
        num_transit: how many of them are kept free for experts that a prompt's passes need beside those.
    """

    name: str
    free_bytes: int
    layers: tuple[int, ...]
    has_ends: bool
    dense_bytes: int
    cache_bytes: int
    pass_bytes: int
    num_experts: int
    expert_bytes: int
    num_slots: dict[int, int]
    num_transit: dict[int, int]

    @property
    def used_bytes(self) -> int:
        slot_bytes = sum(size * count for size, count in self.num_slots.items())
        return self.dense_bytes + self.cache_bytes + self.pass_bytes + slot_bytes


def plan_devices(
    devices: Sequence[DeviceBudget],
    sizes: ModelSizes,
    values: np.ndarray,
    layer_cache_bytes: Sequence[int],
    pass_bytes: int,
) -> tuple[tuple[DevicePlan, ...], np.ndarray]:
    """Lay consecutive layers on devices and fill what is left of each with the hottest experts of its layers.

    Layers are spread so that every device can hold the same share of what its layers have, experts included. Layers
    that no device has room for stay on the host; they are the last ones.

    Args:
        values: [L, E] f64, what each expert is worth.
        layer_cache_bytes: [L], a full cache's part in each layer.
        pass_bytes: the largest pass; every device that has a layer keeps room for it.

    Returns:
        A plan a device, and [L, E] bool: experts that are on some device.
    """
    kept = [size + cache for size, cache in zip(sizes.layer_bytes, layer_cache_bytes, strict=True)] + [sizes.end_bytes]
    whole = [k + nbytes * sizes.num_experts for k, nbytes in zip(kept, (*sizes.slot_nbytes, 0), strict=True)]
    room = [max(0, device.free_bytes - pass_bytes) for device in devices]
    stops = _spread(kept, whole, room)
    is_on_device = np.zeros(values.shape, bool)
    plans, start = [], 0
    for device, stop in zip(devices, stops, strict=True):
        layers = tuple(range(start, min(stop, len(sizes.layer_bytes))))
        has_ends = start < stop == len(kept)
        dense = sum(sizes.layer_bytes[layer] for layer in layers) + has_ends * sizes.end_bytes
        cache = sum(layer_cache_bytes[layer] for layer in layers)
        peak = pass_bytes if start < stop else 0
        chosen, num_transit = _hottest(sizes, values, layers, device.free_bytes - dense - cache - peak)
        is_on_device |= chosen
        num_slots = dict(num_transit)
        for layer in layers:
            if size := sizes.slot_nbytes[layer]:
                num_slots[size] += int(chosen[layer].sum())
        num_bytes = int(chosen.sum(axis=1) @ np.array(sizes.slot_nbytes, np.int64))
        plans.append(
            DevicePlan(
                device.name,
                device.free_bytes,
                layers,
                has_ends,
                dense,
                cache,
                peak,
                int(chosen.sum()),
                num_bytes,
                num_slots,
                num_transit,
            )
        )
        start = stop
    return tuple(plans), is_on_device


def _spread(kept: list[int], whole: list[int], room: list[int]) -> list[int]:
    """Where each device's range of layers ends.

    The smallest share of `whole` that lets the devices take all layers in turn; one share for all keeps the load in
    proportion to the room. What must be kept has to fit in any case.
    """

    def take(share: float) -> list[int]:
        stops, layer = [], 0
        for available in room:
            kept_bytes = whole_bytes = 0
            while layer < len(kept):
                kept_bytes, whole_bytes = kept_bytes + kept[layer], whole_bytes + whole[layer]
                if kept_bytes > available or whole_bytes > share * available:
                    break
                layer += 1
            stops.append(layer)
        return stops

    low, high = 0.0, 2.0 * sum(whole) / max(1, min((r for r in room if r), default=1))
    if take(high)[-1:] != [len(kept)]:
        return take(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if take(middle)[-1] == len(kept) else (middle, high)
    return take(high)


def _hottest(
    sizes: ModelSizes, values: np.ndarray, layers: Sequence[int], room: int
) -> tuple[np.ndarray, dict[int, int]]:
    """The experts of these layers that are worth most for their bytes and fit, [L, E] bool; and slots for transit.

    Where not all fit, the last of those that would make room for transit: a quarter at most.
    """
    chosen = np.zeros(values.shape, bool)
    sparse = [layer for layer in layers if sizes.slot_nbytes[layer]]
    num_transit = {sizes.slot_nbytes[layer]: 0 for layer in sparse}
    if not sparse:
        return chosen, num_transit
    members = np.flatnonzero(np.isin(np.arange(len(values)), sparse).repeat(sizes.num_experts))
    nbytes = np.repeat(np.array(sizes.slot_nbytes, np.int64), sizes.num_experts)
    order = hottest_first(members, values.ravel()[members] / nbytes[members], sizes.num_experts)
    num = int(np.searchsorted(np.cumsum(nbytes[order]), room, side="right"))
    if num < len(order) and num // 4 >= 2:  # of two, one is filled while the other is computed with
        left = num - min(MAX_TRANSIT, num // 4)
        for size, count in zip(*np.unique(nbytes[order[left:num]], return_counts=True), strict=True):
            num_transit[int(size)] = int(count)
        num = left
    chosen.ravel()[order[:num]] = True
    return chosen, num_transit
