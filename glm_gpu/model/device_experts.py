"""The routed experts of a layer in one pass on a device: all at hand, or some still to come."""

import numpy as np

from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.model.device_layer import Compute
from glm_gpu.slab import SlabLayout
from glm_gpu.tiers.device_store import DeviceStore


class CompleteLayer:
    """A layer whose experts all have an address: the host is not asked. See `glm_gpu.model.device_layer.LayerExperts`.

    What was chosen is counted once the pass is done.
    """

    following = None

    def __init__(self, layout: SlabLayout, table: View) -> None:
        self.layout, self._table = layout, table

    def chosen(self, ids: View, guess: View | None) -> None:
        pass

    def compute_resident(self, compute: Compute) -> None:
        compute(self._table)

    def compute_missing(self, compute: Compute) -> None:
        pass


class SteppedLayer:
    """A layer that may lack experts: the host waits for the router's choice, and for nothing else.

    What is there is queued before the wait, so the device computes while the host looks and copies run.

    Args:
        num_decode: the first so many rows of the pass are of answers.
        following: the next layer, if experts that it will probably choose shall be brought ahead.
    """

    def __init__(self, store: DeviceStore, layer: int, num_decode: int, following: int | None = None) -> None:
        self.layout = store.layout(layer)
        self._store, self._layer, self._num_decode, self.following = store, layer, num_decode, following
        self._guess: np.ndarray | None = None

    def chosen(self, ids: View, guess: View | None) -> None:
        tier = self._store.tier_of(self._layer)
        # before the event: once that is reached, the table's row on the host may be written again
        self._table = tier.table.row(self._layer)
        if guess is not None:
            self._guess = tier.device.host_array(guess.shape, np.int32)
            tier.device.fetch(self._guess, guess)
        self._choices = tier.device.host_array(ids.shape, np.int32)
        self._event = tier.device.fetch(self._choices, ids)

    def compute_resident(self, compute: Compute) -> None:
        compute(self._table)

    def compute_missing(self, compute: Compute) -> None:
        self._store.wait_for(self._event)
        ahead = None if self._guess is None else (self.following, np.unique(self._guess))
        self._store.compute_missing(self._layer, self._choices, self._num_decode, compute, ahead)
