"""The only door to experts: `with store.lease(layer, ids) as slabs`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.recipe import Recipe
from glm_gpu.slab import SlabLayout
from glm_gpu.tiers.expert import expert_layout, read_expert
from glm_gpu.tiers.heat import Heat


@dataclass(frozen=True)
class TierReport:
    """One tier's occupancy and traffic."""

    name: str
    num_experts: int
    used_bytes: int
    capacity_bytes: int
    hits: dict[Phase, int]


class ExpertStore(Protocol):
    """What the model knows of experts: slabs, never where they lie."""

    def layout(self, layer: int) -> SlabLayout:
        """How the layer's slabs are laid out."""

    def count(self, layer: int, ids: np.ndarray, phase: Phase) -> None:
        """Record a pass's choices, [T, K], before they are leased."""

    @contextmanager
    def lease(self, layer: int, ids: np.ndarray) -> Iterator[list[np.ndarray]]:
        """The slabs of distinct experts, [U], in the order asked; none moves while the lease is held."""


class ResidentStore:
    """Every expert in memory, in one arena.

    Args:
        layers: the sparse layers to load, the multi-token layer among them if it will run.

    Raises:
        CheckpointError: an expert cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, layers: list[int]) -> None:
        num_experts = checkpoint.config.n_routed_experts
        self.heat = Heat(max(layers) + 1, num_experts)
        self._layouts = {layer: expert_layout(checkpoint, recipe, layer) for layer in layers}
        offsets = np.cumsum([0] + [self._layouts[layer].aligned_nbytes * num_experts for layer in layers])
        self._arena = np.empty(int(offsets[-1]), np.uint8)
        self._slabs: dict[int, list[np.ndarray]] = {}
        for layer, offset in zip(layers, offsets, strict=False):
            layout = self._layouts[layer]
            rows = self._arena[offset : offset + layout.aligned_nbytes * num_experts].reshape(num_experts, -1)
            self._slabs[layer] = [rows[expert, : layout.nbytes] for expert in range(num_experts)]
            for expert, slab in enumerate(self._slabs[layer]):
                read_expert(checkpoint, layout, layer, expert, slab)

    def layout(self, layer: int) -> SlabLayout:
        return self._layouts[layer]

    def count(self, layer: int, ids: np.ndarray, phase: Phase) -> None:
        self.heat.count(layer, ids, phase)

    @contextmanager
    def lease(self, layer: int, ids: np.ndarray) -> Iterator[list[np.ndarray]]:
        slabs = self._slabs[layer]
        yield [slabs[expert] for expert in ids]

    def report(self) -> list[TierReport]:
        """The tiers as they stand; here one, which every choice hits."""
        hits = {phase: int(uses.sum()) for phase, uses in self.heat.uses.items()}
        num_experts = sum(len(slabs) for slabs in self._slabs.values())
        return [TierReport("ram", num_experts, self._arena.nbytes, self._arena.nbytes, hits)]
