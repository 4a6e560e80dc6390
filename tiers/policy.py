"""What to keep: how much each expert is worth in memory, and which to give up first."""

from collections.abc import Sequence

import numpy as np

from glm_gpu.tiers.heat import Heat

# Share of the fast signal in an expert's worth.
FAST_SHARE = 0.4


def worth(heat: Heat, layers: slice | np.ndarray = slice(None)) -> np.ndarray:
    """How much each expert is worth in memory, [len(layers), E] f64: the uses a token expected of it.

    Experts of different layers compare, whatever each layer's clock says. 0 for those never used.
    """
    return _mix(*heat.rates(layers))


def keep_value(heat: Heat, layers: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """How much chosen experts are worth in memory, [n] f64; higher means keep. For a few; `worth` is quicker for most.

    Args:
        layers, experts: [n] int.
    """
    return _mix(*heat.rates_at(layers, experts))


class Ranking:
    """Experts that may be given up, the least worth first. Not thread-safe.

    An expert's worth changes only when its own layer is counted, so one row is recomputed then and the order is
    always exact. At GLM-5.2's 19,456 experts a count costs 20 us and finding the least 10 us.

    Args:
        layers: whose experts compete for the same slots.
    """

    def __init__(self, heat: Heat, layers: Sequence[int]) -> None:
        self._heat = heat
        self._layers = list(layers)
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        shape = (len(layers), heat.shape[1])
        self._worth = worth(heat, np.array(self._layers))
        self._offered = np.zeros(shape, bool)
        self._ranked = np.full(shape, np.inf)  # worth where offered

    def update(self, layer: int) -> None:
        """Take in what the heat has counted in a layer."""
        row = self._row_of[layer]
        self._worth[row] = worth(self._heat, slice(layer, layer + 1))[0]
        np.copyto(self._ranked[row], self._worth[row], where=self._offered[row])

    def offer(self, layer: int, experts: Sequence[int] | np.ndarray) -> None:
        """These may be given up from now on."""
        row = self._row_of[layer]
        self._offered[row][experts] = True
        self._ranked[row][experts] = self._worth[row][experts]

    def withdraw(self, layer: int, experts: Sequence[int] | np.ndarray) -> None:
        """These must stay (leased, pinned, in flight) or are gone."""
        row = self._row_of[layer]
        self._offered[row][experts] = False
        self._ranked[row][experts] = np.inf

    def least(self) -> tuple[int, int, float] | None:
        """(layer, expert, worth) of the one to give up first; None when nothing may be."""
        place = int(self._ranked.argmin())
        row, expert = divmod(place, self._ranked.shape[1])
        value = float(self._ranked[row, expert])
        return None if value == np.inf else (self._layers[row], expert, value)


def _mix(slow: np.ndarray, fast: np.ndarray) -> np.ndarray:
    fast -= slow
    fast *= FAST_SHARE
    fast += slow
    return fast
