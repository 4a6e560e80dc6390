"""Background moves: which experts to read because heat says so, and how fast."""

import time

import numpy as np

from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.residency import HYSTERESIS, Key

# A background read starts only while fewer are under way, so that a miss never queues behind many.
MAX_IN_FLIGHT = 2
# The rate bound lets this much through at once after a pause.
BURST_S = 0.25


class Promotions:
    """A queue of experts to read when nothing is more urgent.

    Args:
        bytes_s: bound on background reads, averaged; infinity for none.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._allowance = bytes_s * BURST_S
        self._at = time.monotonic()
        self._in_flight = 0
        self._wanted: list[Key] = []

    def want(self, keys: list[Key]) -> None:
        """Replace the queue: the last key comes first."""
        self._wanted = keys

    def may_begin(self) -> bool:
        """Whether there is something to read and the bounds allow it now."""
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._at) * self._bytes_s, self._bytes_s * BURST_S)
        self._at = now
        return bool(self._wanted) and self._in_flight < MAX_IN_FLIGHT and self._allowance > 0

    def take(self) -> Key:
        """The next expert."""
        return self._wanted.pop()

    def begun(self, num_bytes: int) -> None:
        self._in_flight += 1
        self._allowance -= num_bytes

    def ended(self) -> None:
        self._in_flight -= 1


def hottest(
    heat: Heat, layers: list[int], num: int, pinned: set[Key], is_elsewhere: np.ndarray | None = None
) -> set[Key]:
    """The experts of these layers to pin: the `num` most valuable, a pinned one counting more than it is worth.

    So an expert takes another's place only when it is clearly hotter. Those that are elsewhere, [L, E] bool, are worth
    nothing.
    """
    num_experts, row_of = heat.shape[1], {layer: row for row, layer in enumerate(layers)}
    values = worth(heat, np.array(layers)).ravel()
    if is_elsewhere is not None:
        values[is_elsewhere[layers].ravel()] = -1.0
    held = [row_of[layer] * num_experts + expert for layer, expert in pinned if layer in row_of]
    values[held] *= HYSTERESIS
    best = np.argpartition(-values, num)[:num] if num < len(values) else np.arange(len(values))
    return {(layers[n // num_experts], n % num_experts) for n in best.tolist()}


def by_worth(heat: Heat, layers: list[int], is_elsewhere: np.ndarray | None = None) -> list[Key]:
    """Every expert of these layers, the most valuable last; without those that are elsewhere, [L, E] bool."""
    order = np.argsort(worth(heat, np.array(layers)).T.ravel(), kind="stable")
    if is_elsewhere is not None:
        order = order[~is_elsewhere[layers].T.ravel()[order]]
    return [(layers[n % len(layers)], n // len(layers)) for n in order.tolist()]
