"""The whole model on devices: token ids in, logits out, by the same description as `glm_gpu.model.transformer`."""

import logging
from collections.abc import Callable, Sequence

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.device import DeviceMemoryError
from glm_gpu.device_cache import CacheMirrors, DeviceCache, DeviceCachePool
from glm_gpu.errors import CapacityError
from glm_gpu.model.device_chain import Chain, Step
from glm_gpu.model.device_part import DevicePart, pass_shape
from glm_gpu.model.transformer import Output
from glm_gpu.tiers.device_store import DeviceStore

log = logging.getLogger(__name__)

# What experts give back when something else finds no memory.
GIVE_BACK_BYTES = 512 << 20


class DeviceTransformer:
    """A model on devices.

    Args:
        parts: in the order of their layers; one of them has the ends.
        caches: room for sequences on the same devices.

    Attributes:
        chains: of the trunk, and whatever else runs beside it.
    """

    def __init__(
        self, config: ModelConfig, parts: Sequence[DevicePart], store: DeviceStore, caches: DeviceCachePool
    ) -> None:
        self.config, self.store, self.caches = config, store, caches
        self.parts = list(parts)
        self._mirrors = CacheMirrors(caches)
        steps: list[tuple[DevicePart, Step]] = [(part, "layers") for part in parts if part.layers]
        self._chain = Chain(config, store, [(self.ends, "embed"), *steps, (self.ends, "head")])
        self.chains = [self._chain]

    @property
    def ends(self) -> DevicePart:
        """The part that has embedding and head."""
        return next(part for part in self.parts if part.ends is not None)

    def new_cache(self, max_length: int, is_bf16: bool) -> DeviceCache:
        """An empty cache for one sequence of at most the length that the pool was made for.

        Raises:
            CapacityError: all that there is room for are open.
        """
        assert is_bf16 and max_length <= self.caches.max_length
        return self.caches.new_cache()

    def forward(self, batch: Batch, probe: None = None) -> Output:
        """Run a pass; afterwards the batch's caches hold its tokens.

        If a layer raises, the caches keep the lengths they had, so the pass can be repeated.

        Raises:
            CapacityError: a device had no memory left, and still had none after experts gave some back.
        """
        assert probe is None, "what a device computes is not shown"
        output = self.with_memory(self._chain, lambda: self._run(batch))
        batch.commit()
        return output

    def with_memory(self, chain: Chain, run: Callable[[], Output]) -> Output:
        """Run a pass; if a device has no memory left, slots of experts are given back and it is repeated, once.

        Args:
            run: runs the pass through the chain.

        Raises:
            CapacityError: memory did not suffice the second time either.
        """
        try:
            return _settled(chain, run)
        except DeviceMemoryError as error:
            for each in self.chains:
                each.forget_graphs()
            freed = self.store.give_back(GIVE_BACK_BYTES)
            log.warning("%s; %d bytes of experts were given back and the pass is repeated", str(error), freed)
        try:
            return _settled(chain, run)
        except DeviceMemoryError as again:
            raise CapacityError(str(again)) from again

    def _run(self, batch: Batch) -> Output:
        self.store.begin_pass(batch.phase)
        caches = self._mirrors.begin([span.cache for span in batch.spans])
        shape, chain = pass_shape(batch, self.config), self._chain
        feeds = []
        for part in chain.parts:
            addresses = [self.caches.begin(self.parts.index(part), cache.index) for cache in caches]
            with part.device.computing():
                feeds.append(part.workspace.feed(batch, shape, addresses))
        output = chain.run(batch, shape, feeds)
        self._mirrors.end([(span.cache, span.cached_stop) for span in batch.spans])
        return output


def _settled(chain: Chain, run: Callable[[], Output]) -> Output:
    try:
        return run()
    except BaseException:
        chain.settle()
        raise
