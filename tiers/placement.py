"""Experts to tiers: which fit where, the most valuable for their bytes first."""

import numpy as np

from glm_gpu.errors import RequestError
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.sizes import ModelSizes

TIERS = ("vram", "locked", "ram", "page cache", "disk")
NO_TIER = 255
# Heat of so many tokens counts as much as the assumption that all experts of a layer are used alike.
_PRIOR_TOKENS = 32


def expected_uses(sizes: ModelSizes, heat: Heat | None) -> np.ndarray:
    """The uses a token expected of each expert, [L, E] f64; K / E where heat knows nothing, 0 in dense layers."""
    is_sparse = np.array(sizes.slab_nbytes) > 0
    alike = np.full((len(is_sparse), sizes.num_experts), sizes.experts_per_tok / sizes.num_experts)
    if heat is not None:
        tokens = heat.clock[:, None]
        alike = (worth(heat) * tokens + alike * _PRIOR_TOKENS) / (tokens + _PRIOR_TOKENS)
    return alike * is_sparse[:, None]


def hottest_first(members: np.ndarray, values: np.ndarray, num_experts: int) -> np.ndarray:
    """Experts by falling value; of equals the lower number first, so that without heat all layers get alike.

    Args:
        members: [n] int, layer * E + expert.
        values: [n] f64.
    """
    return members[np.lexsort((members % num_experts, -values))]


def least_slots(sizes: ModelSizes, expert_slots: int | None) -> dict[int, int]:
    """The slots by size that a plan has in any case: room for one layer's experts of one token, in every size.

    Raises:
        RequestError: `expert_slots` leaves some size without a slot.
    """
    slot_sizes = {size for size in sizes.slot_nbytes if size}
    if expert_slots is None:
        return dict.fromkeys(sorted(slot_sizes), sizes.experts_per_tok)
    if expert_slots < len(slot_sizes):
        raise RequestError(f"--expert-slots is {expert_slots}, expected at least {len(slot_sizes)}, one a slab size")
    return dict.fromkeys(sorted(slot_sizes), 1)


def slots_by_heat(
    sizes: ModelSizes, uses: np.ndarray, is_elsewhere: np.ndarray, room: int, expert_slots: int | None
) -> dict[int, int]:
    """How many slots of each size to have.

    Args:
        uses: [L, E] f64, as `expected_uses` gives them.
        is_elsewhere: [L, E] bool, experts that need no slot.
        room: bytes for all slots.
        expert_slots: at most so many; None for as many as fit.
    """
    nbytes = np.repeat(np.array(sizes.slot_nbytes, np.int64)[:, None], sizes.num_experts, axis=1)
    counts = {}
    spare = (nbytes > 0) & ~is_elsewhere
    for size, least in least_slots(sizes, expert_slots).items():
        members = np.flatnonzero((nbytes == size) & spare)
        first = hottest_first(members, uses.ravel()[members], sizes.num_experts)[:least]
        spare.ravel()[first] = False
        # with devices, experts on their way there pass through slots, however few have to stay
        counts[size] = least if is_elsewhere.any() else len(first)
    room -= sum(size * count for size, count in counts.items())
    rest = np.flatnonzero(spare)
    order = hottest_first(rest, uses.ravel()[rest] / nbytes.ravel()[rest], sizes.num_experts)
    num = int(np.searchsorted(np.cumsum(nbytes.ravel()[order]), room, side="right"))
    if expert_slots is not None:
        num = min(num, expert_slots - sum(counts.values()))
    for size, count in zip(*np.unique(nbytes.ravel()[order[:num]], return_counts=True), strict=True):
        counts[int(size)] += int(count)
    return counts


def place(
    sizes: ModelSizes,
    uses: np.ndarray,
    is_on_device: np.ndarray,
    num_slots: dict[int, int],
    num_locked: dict[int, int],
    page_cache_bytes: int,
) -> np.ndarray:
    """The tier that each expert begins in: [L, E] uint8, an index into TIERS, NO_TIER in dense layers."""
    nbytes = np.repeat(np.array(sizes.slot_nbytes, np.int64)[:, None], sizes.num_experts, axis=1)
    tiers = np.where(nbytes > 0, TIERS.index("disk"), NO_TIER).astype(np.uint8)
    tiers[is_on_device] = TIERS.index("vram")
    flat = tiers.ravel()
    for size, count in num_slots.items():
        members = np.flatnonzero((nbytes == size) & ~is_on_device)
        hottest = hottest_first(members, uses.ravel()[members], sizes.num_experts)
        flat[hottest[:count]] = TIERS.index("ram")
        flat[hottest[: num_locked.get(size, 0)]] = TIERS.index("locked")
    rest = np.flatnonzero(flat == TIERS.index("disk"))
    rest = hottest_first(rest, uses.ravel()[rest] / nbytes.ravel()[rest], sizes.num_experts)
    num = np.searchsorted(np.cumsum(nbytes.ravel()[rest]), page_cache_bytes, side="right")
    flat[rest[:num]] = TIERS.index("page cache")
    return tiers
