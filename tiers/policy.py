"""What to keep: how much each expert is worth in memory, and which to give up first."""

from collections.abc import Callable, Sequence

import numpy as np

from glm_gpu.tiers.heat import Heat

# Share of the fast signal in an expert's worth. Tuned together with the half-lives on traces of the demo, 2,048 tokens
# each of scripture, plays and chats and the three in turns, at 10, 25 and 50 % of the experts in memory. The optimum is
# flat: shares of 0.4 to 0.7 with fast half-lives of 16 to 48 and slow ones of 256 to 1024 lie within 0.3 points.
FAST_SHARE = 0.6


def worth(heat: Heat, layers: slice | np.ndarray = slice(None)) -> np.ndarray:
    """How much each expert is worth in memory, [len(layers), E] f64: the uses a token expected of it.

    Experts of different layers compare, whatever each layer's clock says. 0 for those never used.
    """
    return _mix(*heat.rates(layers))


def layer_worth(heat: Heat, layer: int) -> np.ndarray:
    """How much each expert of one layer is worth in memory, [E] f64."""
    return worth(heat, slice(layer, layer + 1))[0]


class Ranking:
    """Experts that may be given up, the least worth first. Not thread-safe.

    An expert's worth changes only when its own layer is counted, so one row is recomputed then and the order is
    always exact. At GLM-5.2's 19,456 experts a count costs 20 us and finding the least 10 us.

    Args:
        row_worth: the worth of a layer's experts, [E] f64, as it is now; `partial(layer_worth, heat)`.
        layers: whose experts compete for the same slots.
    """

    def __init__(self, row_worth: Callable[[int], np.ndarray], layers: Sequence[int]) -> None:
        self._row_worth = row_worth
        self._layers = list(layers)
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._worth = np.array([row_worth(layer) for layer in layers], np.float64)
        self._offered = np.zeros(self._worth.shape, bool)
        self._ranked = np.full(self._worth.shape, np.inf)  # worth where offered

    def update(self, layer: int) -> None:
        """Take in what has been counted in a layer."""
        row = self._row_of[layer]
        self._worth[row] = self._row_worth(layer)
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
        row, expert = divmod(int(self._ranked.argmin()), self._ranked.shape[1])
        value = float(self._ranked[row, expert])
        return None if value == np.inf else (self._layers[row], expert, value)

    def give_up(self) -> tuple[int, int] | None:
        """(layer, expert) of the one to give up first, withdrawn; None when nothing may be."""
        least = self.least()
        if least is None:
            return None
        layer, expert, _ = least
        row = self._row_of[layer]
        self._offered[row, expert] = False
        self._ranked[row, expert] = np.inf
        return layer, expert


def _mix(slow: np.ndarray, fast: np.ndarray) -> np.ndarray:
    fast -= slow
    fast *= FAST_SHARE
    fast += slow
    return fast
