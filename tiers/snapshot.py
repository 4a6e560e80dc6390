"""A store's state as plain numbers: tiers, traffic, hits, and the map."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from glm_gpu.tiers.placement import NO_TIER, TIERS
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.store import TieredStore
from glm_gpu.tiers.tier_map import map_rows

# `TieredStore.tier_map` codes: on disk, in memory, pinned, in a device's memory.
_STORE_TIERS = np.array([TIERS.index(name) for name in ("disk", "ram", "locked", "vram")], np.uint8)


def snapshots(store: TieredStore, facts: dict) -> Callable[[], dict]:
    """A function that tells the store's state each time it is called; rates are since the call before.

    Args:
        facts: what does not change, put first: the model's path and fingerprint.
    """
    before = (time.monotonic(), store.files.bytes_read, _tokens(store))

    def take() -> dict:
        nonlocal before
        now, read_bytes, tokens = after = (time.monotonic(), store.files.bytes_read, _tokens(store))
        seconds = max(1e-9, now - before[0])
        rates = {
            "read_mb_s": (read_bytes - before[1]) / 1e6 / seconds,
            "tok_s": {phase: (tokens[phase] - before[2][phase]) / seconds for phase in tokens},
        }
        before = after
        rows = map_rows(placement(store), worth(store.heat))
        return {
            **facts,
            "num_experts": store.files.num_experts,
            "tiers": [dataclasses.asdict(tier) for tier in store.report()],
            "tokens": tokens,
            "read_bytes": read_bytes,
            **rates,
            "counters": store.counters.as_dict(),
            "map": [dataclasses.asdict(row) for row in rows],
        }

    return take


def placement(store: TieredStore) -> np.ndarray:
    """The tier that each expert is in now: [L, E] uint8, an index into TIERS, NO_TIER in layers without experts."""
    result = np.full(store.heat.shape, NO_TIER, np.uint8)
    for layer, codes in store.tier_map().items():
        result[layer] = _STORE_TIERS[codes]
    return result


def _tokens(store: TieredStore) -> dict[str, int]:
    return {phase: int(tokens.max()) for phase, tokens in store.heat.tokens.items()}
