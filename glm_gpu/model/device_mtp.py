"""The multi-token layer on a device: what `glm_gpu.model.mtp` does, beside a `DeviceTransformer`."""

from collections.abc import Sequence

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.device_cache import DeviceCache, DeviceCachePool
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.model.device_chain import Chain, Feed
from glm_gpu.model.device_layer import rows_of
from glm_gpu.model.device_part import DevicePart, PassShape, pass_shape
from glm_gpu.model.device_transformer import DeviceTransformer
from glm_gpu.model.indexer import Selection
from glm_gpu.model.transformer import Output


class DeviceMtpHead:
    """The checkpoint's extra layer on one of a model's devices. The ends' device embeds and makes logits.

    Args:
        part: has the layer.
        caches: room for its rows, apart from the trunk's.
    """

    def __init__(self, model: DeviceTransformer, part: DevicePart, caches: DeviceCachePool) -> None:
        self._model, self._part, self._caches = model, part, caches
        ends = model.ends
        self._chain = Chain(model.config, model.store, [(ends, "embed"), (part, "draft"), (ends, "draft head")])
        model.chains.append(self._chain)

    def new_cache(self, max_length: int, is_bf16: bool) -> DeviceCache:
        """An empty cache for one sequence's rows of this layer.

        Raises:
            CapacityError: as many sequences as there is room for are open.
        """
        assert is_bf16 and max_length <= self._caches.max_length
        return self._caches.new_cache()

    def forward(
        self, batch: Batch, hidden: np.ndarray, selections: Sequence[Selection] | None = None
    ) -> tuple[Output, list[Selection]]:
        """Guess, for every row, the token after its own: see `glm_gpu.model.mtp.MtpHead.forward`.

        Args:
            batch: the next tokens, over this head's caches.
            hidden: [T, D] f32.
            selections: one a span, to attend over.

        Returns:
            Output, and for each span what its last row attended over.

        Raises:
            CapacityError: a device had no memory left, and still had none after experts gave some back.
        """
        shape = pass_shape(batch, self._model.config, selections)
        feeds: list[Feed] = []

        def run() -> Output:
            feeds[:] = [self._feed(part, batch, shape, hidden, selections) for part in self._chain.parts]
            return self._chain.run(batch, shape, feeds)

        output = self._model.with_memory(self._chain, run)
        _, own = feeds[self._chain.parts.index(self._part)]
        used = list(selections or self._selections(batch, shape, own.selected))
        batch.commit()
        return output, used

    def _feed(
        self,
        part: DevicePart,
        batch: Batch,
        shape: PassShape,
        hidden: np.ndarray,
        selections: Sequence[Selection] | None,
    ) -> Feed:
        with part.device.computing():
            if part is not self._part:
                return part.workspace.feed(batch, shape, [0] * len(batch.spans))
            addresses = [self._caches.begin(0, span.cache.index) for span in batch.spans]
            return part.workspace.feed(batch, shape, addresses, hidden, selections)

    def _selections(self, batch: Batch, shape: PassShape, selected: View) -> list[Selection]:
        counts = batch.positions + 1
        if not shape.is_sparse:
            return [Selection(None, counts[span.stop - 1 : span.stop]) for span in batch.spans]
        counts, found = np.minimum(counts, selected.shape[1]), []
        for span in batch.spans:
            rows = np.empty((1, selected.shape[1]), np.int32)
            self._part.device.fetch(rows, rows_of(selected, span.stop - 1, span.stop)).synchronize()
            found.append(Selection(rows, counts[span.stop - 1 : span.stop]))
        return found
