"""Where the time of a model's passes goes: by part, phase and tier, in kernels, in waiting and in Python."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from glm_gpu.answer import GenerationStats
from glm_gpu.batch import Batch, Phase
from glm_gpu.engine import Engine
from glm_gpu.errors import RequestError
from glm_gpu.kernels.clock import KernelClock, timed_kernels
from glm_gpu.model.transformer import Output, Transformer

# What a pass has just finished when the model shows this quantity. After "router_weights" come the experts, and where
# no router was asked, "hidden" ends a dense MLP.
_FINISHED = {"attended": "attention", "router_weights": "router"}
# Parts in the order of a pass; the experts' line is shared out among the tiers.
PARTS = ("embedding", "attention", "router", "experts", "shared expert", "MLP", "head")
_TIERS = {
    "vram": "in VRAM",
    "locked": "locked in memory",
    "ram": "in memory",
    "prefetched": "read ahead",
    "late": "read ahead, late",
    "missed": "read on demand",
}


@dataclass
class PhaseProfile:
    """One phase's passes.

    Attributes:
        kernel_s: seconds in the kernels of each part; with NumPy, all of a part's seconds.
        wait_s: standing still for reads.
        python_s: in passes, but in neither; 0 with NumPy, where Python and kernels are one.
        uses: distinct experts that passes asked for, by where they were.
    """

    num_passes: int = 0
    pass_s: float = 0.0
    wait_s: float = 0.0
    python_s: float = 0.0
    kernel_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    uses: dict[str, int] = field(default_factory=dict)

    def lines(self, wall_s: float) -> dict[str, float]:
        """Seconds by line, which add up to `wall_s`. The experts' are shared out by the uses of each tier."""
        found = {}
        num_uses = sum(self.uses.values())
        for part, part_s in self.kernel_s.items():
            if part != "experts" or not num_uses:
                found[part] = part_s
                continue
            for tier, uses in self.uses.items():
                found[f"experts {_TIERS[tier]}"] = part_s * uses / num_uses
        found["waiting for reads"] = self.wait_s
        found["Python within passes"] = self.python_s
        found["between passes"] = wall_s - self.pass_s
        return {name: line_s for name, line_s in found.items() if line_s}


class ProfiledTransformer:
    """A model whose every pass is timed; otherwise the model itself."""

    def __init__(self, model: Transformer, clock: KernelClock | None) -> None:
        self._model, self._clock = model, clock
        self.phases: dict[Phase, PhaseProfile] = {}
        self._phase = PhaseProfile()
        self._seen = (0.0, 0.0, 0.0, 0.0)
        self._is_routed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch, probe: None = None) -> Output:
        """As the model's own."""
        phase = self._phase = self.phases.setdefault(batch.phase, PhaseProfile())
        counters = self._model.store.counters.phases[batch.phase]
        uses_before = asdict(counters)
        self._is_routed = False
        began, *_ = self._seen = self._now()
        output = self._model.forward(batch, self._see)
        self._end("head")
        phase.pass_s += self._seen[0] - began
        phase.num_passes += 1
        for tier, uses in asdict(counters).items():
            phase.uses[tier] = phase.uses.get(tier, 0) + uses - uses_before[tier]
        return output

    def _see(self, quantity: str, layer: int, array: np.ndarray) -> None:
        """The probe: what has been computed by now."""
        if quantity in _FINISHED:
            self._end(_FINISHED[quantity])
            self._is_routed = quantity == "router_weights"
        elif quantity == "hidden":
            self._end("embedding" if layer < 0 else "experts" if self._is_routed else "MLP")

    def _end(self, part: str) -> None:
        """Count what has passed since the last call for a part."""
        phase, before, now = self._phase, self._seen, self._now()
        wall, in_kernels, in_mlp, waiting = (new - old for new, old in zip(now, before, strict=True))
        phase.wait_s += waiting
        if self._clock is None:
            in_kernels = wall - waiting
        phase.python_s += wall - in_kernels - waiting
        if part == "experts":
            phase.kernel_s["shared expert"] += in_mlp
            in_kernels -= in_mlp
        phase.kernel_s[part] += in_kernels
        self._seen = now

    def _now(self) -> tuple[float, float, float, float]:
        """Seconds so far: by the clock, in all kernels, in the MLP's, waiting for reads."""
        clock = self._clock
        in_kernels = (clock.seconds, clock.by_kernel.get("mlp", 0.0)) if clock else (0.0, 0.0)
        return (time.perf_counter(), *in_kernels, self._model.store.counters.wait_s)


@contextmanager
def profiled(engine: Engine) -> Iterator[dict[Phase, PhaseProfile]]:
    """Times the passes of sessions that are made inside a `with`; outside nothing is measured, and nothing slower.

    Raises:
        RequestError: GPUs compute; their kernels run on while the host goes ahead.
    """
    if engine.devices:
        raise RequestError("--profile times the CPU's kernels; for a GPU there is bench/gpu.py, or use --device cpu")
    model = engine.model
    with timed_kernels() as clock:
        timed = ProfiledTransformer(model, clock)
        engine.model = cast(Transformer, timed)
        try:
            yield timed.phases
        finally:
            engine.model = model


def profile_document(phases: dict[Phase, PhaseProfile], stats: GenerationStats) -> dict:
    """An answer's profile for JSON: for each phase tokens, passes, wall seconds, and seconds by line."""
    new_tokens = stats.prompt_tokens - stats.reused_tokens
    walls = {"prefill": (new_tokens, stats.prefill_s), "decode": (stats.completion_tokens - 1, stats.decode_s)}
    return {
        name: {
            "tokens": tokens,
            "passes": phases[name].num_passes,
            "wall_s": wall_s,
            "seconds": phases[name].lines(wall_s),
        }
        for name, (tokens, wall_s) in walls.items()
        if name in phases and tokens > 0
    }
