"""What a running server tells of itself: its state in one object, and where every expert is."""

import dataclasses
import time
from collections import deque
from typing import Any

import numpy as np

from glm_gpu import __version__
from glm_gpu.engine import Engine
from glm_gpu.kernels import cpu
from glm_gpu.machine import peak_rss_bytes
from glm_gpu.scheduler import Scheduler
from glm_gpu.tiers.placement import TIERS

# Rates are over the requests for status of the last seconds.
_RATE_WINDOW_S = 10.0
_HEAT_LEVELS = 9
# What `TieredStore.tier_map` calls 0, 1, 2, 3.
_TIER_OF_CODE = np.array([TIERS.index(name) for name in ("disk", "ram", "locked", "vram")])


class Live:
    """Looks at an engine and its scheduler; never waits for either's work."""

    def __init__(self, engine: Engine, scheduler: Scheduler, model_name: str) -> None:
        self._engine, self._scheduler, self._model_name = engine, scheduler, model_name
        self._began = time.monotonic()
        self._seen: deque[tuple[float, int, int]] = deque()

    def status(self, num_connections: int) -> dict[str, Any]:
        """Model, queue, cache, tiers, speed."""
        engine, scheduler = self._engine, self._scheduler
        counts, pool, tree = scheduler.counts, scheduler.pool, scheduler.tree
        decode_tok_s, rows_s = self._rates()
        found = {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._began, 1),
            "model": {
                "name": self._model_name,
                "type": engine.config.model_type,
                "layers": engine.config.num_layers,
                "experts": engine.config.n_routed_experts,
                "experts_per_tok": engine.config.num_experts_per_tok,
                "fingerprint": engine.checkpoint.fingerprint,
                "context": engine.context,
            },
            "kernels": {"instruction_set": cpu.implementation(), "threads": cpu.get_threads()},
            "requests": {
                "running": scheduler.num_running,
                "max_running": scheduler.max_running,
                "queued": scheduler.num_queued,
                "max_queued": scheduler.max_queued,
                "connections": num_connections,
                "ended": dict(counts.ended),
                "refused": counts.refused,
            },
            "speed": {
                "decode_tok_s": decode_tok_s,
                "rows_s": rows_s,
                "median_first_token_s": _finite(counts.first_token_s.quantile(0.5)),
                "median_token_gap_s": _finite(counts.token_gap_s.quantile(0.5)),
            },
            "tokens": {
                "prompt": counts.prompt_tokens,
                "cached": counts.reused_tokens,
                "completion": counts.completion_tokens,
            },
            "speculation": {
                "mode": engine.speculate,
                "drafted_tokens": counts.drafted_tokens,
                "accepted_tokens": counts.accepted_tokens,
                "tokens_per_pass": round(1 + counts.accepted_tokens / max(1, counts.answer_steps), 3),
                **engine.speculation.as_dict(),
            },
            "cache": {
                "page_tokens": pool.page_tokens,
                "pages": pool.num_pages,
                "taken_pages": pool.num_pages - pool.num_free,
                "remembered_pages": tree.num_pages,
                "bytes": pool.num_pages * pool.page_bytes,
            },
            "tiers": [dataclasses.asdict(tier) for tier in engine.store.report()],
            "expert_uses": {
                phase: {**dataclasses.asdict(uses), "hit_rate": uses.hit_rate}
                for phase, uses in engine.store.counters.phases.items()
            },
            "peak_rss_bytes": peak_rss_bytes(),
        }
        return _plain(found)

    def experts(self) -> dict[str, Any]:
        """The map of layers and experts: for each sparse layer a digit an expert for its tier, and one for its heat.

        A tier's digit is its place in `names`; heat runs from 0, never used, to 9, the map's most used experts.
        """
        store = self._engine.store
        places = store.tier_map()
        uses_by_phase = store.heat.uses.values()
        uses = {layer: sum(uses[layer] for uses in uses_by_phase) for layer in places}
        greatest = max((int(layer_uses.max()) for layer_uses in uses.values()), default=0)
        return {
            "names": list(TIERS),
            "experts": self._engine.config.n_routed_experts,
            "layers": [
                {
                    "layer": layer,
                    "tiers": _digits(_TIER_OF_CODE[place]),
                    "heat": _digits(_levels(uses[layer], greatest)),
                }
                for layer, place in sorted(places.items())
            ],
        }

    def _rates(self) -> tuple[float, float]:
        """Tokens generated and rows computed a second, lately."""
        now, counts = time.monotonic(), self._scheduler.counts
        self._seen.append((now, counts.completion_tokens, counts.computed_rows))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        then, tokens, rows = self._seen[0]
        if now - then < 0.05:
            return 0.0, 0.0
        return (
            round((counts.completion_tokens - tokens) / (now - then), 2),
            round((counts.computed_rows - rows) / (now - then), 2),
        )


def _plain(value: Any) -> Any:
    """The same with NumPy's numbers as Python's, which JSON knows."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _finite(value: float | None) -> float | None:
    return None if value is None or value == float("inf") else value


def _levels(uses: np.ndarray, greatest: int) -> np.ndarray:
    """0 for no use, else 1 to 9 by the square root of the share: a few experts are far hotter than all others."""
    if greatest == 0:
        return np.zeros(len(uses), np.int64)
    return np.ceil(np.sqrt(uses / greatest) * _HEAT_LEVELS).astype(np.int64)


def _digits(values: np.ndarray) -> str:
    return "".join(map(str, values.tolist()))
