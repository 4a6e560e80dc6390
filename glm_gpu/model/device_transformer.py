"""The whole model on devices: token ids in, logits out, by the same description as `glm_gpu.model.transformer`."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm_gpu.batch import Batch, Phase
from glm_gpu.config import ModelConfig
from glm_gpu.device import DeviceMemoryError, Graph
from glm_gpu.device_cache import CacheMirrors, DeviceCache, DeviceCachePool
from glm_gpu.errors import CapacityError
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.model.device_layer import PassInputs, rows_of
from glm_gpu.model.device_part import DevicePart, PassShape, pass_shape
from glm_gpu.model.transformer import Output
from glm_gpu.tiers.device_store import DeviceStore

log = logging.getLogger(__name__)

# Passes of up to so many rows are replayed from graphs: decoding, and verification of drafts.
MAX_GRAPH_ROWS = 16
# Graphs kept at a time; each shape of a pass has its own, about 1 MB.
MAX_GRAPHS = 32
# What experts give back when something else finds no memory.
GIVE_BACK_BYTES = 512 << 20


@dataclass
class _Piece:
    """Work of a pass on one device without a break: what to queue, and where the stream of hidden states comes from."""

    part: DevicePart
    origin: DevicePart | None
    steps: list[str]


@dataclass(frozen=True)
class _Captured:
    """A pass that can be replayed: a graph for each piece, and where results lie afterwards."""

    graphs: list[Graph]
    hidden: View
    logits: list[View]


class DeviceTransformer:
    """A model on devices. Each holds whole layers; hidden states hop from one to the next.

    A pass in which the host has nothing to decide is recorded as one graph a device the second time its shape comes,
    and replayed from then on; another is queued layer by layer. Both launch the same kernels on the same memory.

    Args:
        parts: in the order of their layers; one of them has the ends.
        caches: room for sequences on the same devices.
    """

    def __init__(
        self, config: ModelConfig, parts: Sequence[DevicePart], store: DeviceStore, caches: DeviceCachePool
    ) -> None:
        self.config, self.store, self.caches = config, store, caches
        self.parts = list(parts)
        self._mirrors = CacheMirrors(caches)
        self._seen: set[PassShape] = set()
        self._graphs: dict[PassShape, _Captured] = {}
        self._pieces = _pieces(self.parts)

    def new_cache(self, max_length: int, is_bf16: bool) -> DeviceCache:
        """An empty cache for one sequence of at most the length that the pool was made for.

        Raises:
            CapacityError: all that there is room for are open.
        """
        assert is_bf16 and max_length <= self.caches.max_length
        return self.caches.new_cache()

    def forward(self, batch: Batch, probe: None = None) -> Output:
        """Run a pass; afterwards the batch's caches hold its tokens.

        If a device has no memory left, slots of experts are given back and the pass is repeated, once. If a layer
        raises, the caches keep the lengths they had, so the pass can be repeated.

        Raises:
            CapacityError: memory did not suffice the second time either.
        """
        assert probe is None, "what a device computes is not shown"
        try:
            output = self._forward(batch)
        except DeviceMemoryError as error:
            self._graphs.clear()
            freed = self.store.give_back(GIVE_BACK_BYTES)
            log.warning("%s; %d bytes of experts were given back and the pass is repeated", str(error), freed)
            try:
                output = self._forward(batch)
            except DeviceMemoryError as again:
                raise CapacityError(str(again)) from again
        batch.commit()
        return output

    def _forward(self, batch: Batch) -> Output:
        try:
            return self._run(batch)
        except BaseException:
            # What is queued of a pass that failed must not meet the numbers of the next one.
            for part in self.parts:
                with suppress(RuntimeError):
                    part.device.compute.synchronize()
            raise

    def _run(self, batch: Batch) -> Output:
        self.store.begin_pass(batch.phase)
        caches = self._mirrors.begin([span.cache for span in batch.spans])
        shape = pass_shape(batch, self.config)
        inputs = []
        for index, part in enumerate(self.parts):
            addresses = [self.caches.begin(index, cache.index) for cache in caches]
            with part.device.computing():
                inputs.append(part.workspace.feed(batch, shape, addresses))
        is_reaching = shape.num_rows <= MAX_GRAPH_ROWS and self.store.is_reachable()
        captured = self._captured(shape, inputs) if is_reaching and len(shape.logit_runs) == 1 else None
        if captured is None:
            output, complete = self._step(batch, shape, inputs, is_reaching)
        else:
            output, complete = self._replay(captured, shape, inputs), self.store.files.layers
        self._count(batch, inputs, frozenset(complete))
        self._mirrors.end([(span.cache, span.cached_stop) for span in batch.spans])
        return output

    def _step(
        self, batch: Batch, shape: PassShape, inputs: list[tuple[View, PassInputs]], is_reaching: bool
    ) -> tuple[Output, list[int]]:
        """Queue everything launch by launch; the result, and the layers whose choices the host has not seen yet."""
        complete: list[int] = []
        for piece in self._pieces:
            self._hop(piece, shape, inputs)
            with piece.part.device.computing():
                complete += self._queue(piece, inputs, batch.phase, is_reaching)
        part, row = self._pieces[-1].part, 0
        logits = np.empty((len(batch.logits_at), self.config.vocab_size), np.float32)
        hidden = np.empty((shape.num_rows, self.config.hidden_size), np.float32)
        with part.device.computing():
            normed, split = part.finish(shape.num_rows)
            marked = part.workspace.arena.used_bytes
            for start, stop in shape.logit_runs:
                part.device.fetch(logits[row : row + stop - start], part.logits(split, start, stop))
                part.workspace.arena.cut(marked)
                row += stop - start
            part.device.fetch(hidden, normed).synchronize()
        return Output(logits, hidden), complete

    def _queue(
        self, piece: _Piece, inputs: list[tuple[View, PassInputs]], phase: Phase, is_reaching: bool
    ) -> list[int]:
        """Launch a piece's embedding and layers; the layers whose choices the host has not seen."""
        token_ids, own = inputs[self.parts.index(piece.part)]
        complete: list[int] = []
        for step in piece.steps:
            if step == "embed":
                piece.part.embed(token_ids)
            elif step == "layers":
                complete = piece.part.run_layers(own, self.store, phase, is_reaching)
        return complete

    def _captured(self, shape: PassShape, inputs: list[tuple[View, PassInputs]]) -> _Captured | None:
        """The graphs of a pass that is decided already, made when its shape comes a second time."""
        for tier in self.store.tiers:  # graphs hold kernels only: tables are brought up to date before
            for layer in tier.layers:
                tier.reach.row(layer)
        if shape not in self._graphs:
            if shape not in self._seen:
                self._seen.add(shape)
                return None
            self._graphs[shape] = self._capture(shape, inputs)
            if len(self._graphs) > MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return self._graphs[shape]

    def _capture(self, shape: PassShape, inputs: list[tuple[View, PassInputs]]) -> _Captured:
        results: list[tuple[View, list[View]]] = []

        def work(piece: _Piece) -> None:
            self._queue(piece, inputs, "decode", is_reaching=True)
            if "head" in piece.steps:
                results.append(piece.part.head(shape))

        graphs = [piece.part.device.capture(partial(work, piece)) for piece in self._pieces]
        return _Captured(graphs, *results[0])

    def _replay(self, captured: _Captured, shape: PassShape, inputs: list[tuple[View, PassInputs]]) -> Output:
        for graph, piece in zip(captured.graphs, self._pieces, strict=True):
            self._hop(piece, shape, inputs)
            with piece.part.device.computing():
                graph.replay()
        device, (logits,) = self._pieces[-1].part.device, captured.logits
        rows, hidden = np.empty(logits.shape, np.float32), np.empty(captured.hidden.shape, np.float32)
        device.fetch(rows, logits)
        device.fetch(hidden, captured.hidden).synchronize()
        return Output(rows, hidden)

    def _hop(self, piece: _Piece, shape: PassShape, inputs: list[tuple[View, PassInputs]]) -> None:
        """Bring the hidden states, and the positions selected, from the device that had them last."""
        origin, target = piece.origin, piece.part
        if origin is None or origin is target:
            return
        num_rows = shape.num_rows
        pairs = [(rows_of(target.workspace.x, 0, num_rows), rows_of(origin.workspace.x, 0, num_rows))]
        if shape.is_sparse:
            new, old = (inputs[self.parts.index(part)][1] for part in (target, origin))
            pairs += [(new.selected, old.selected), (new.num_selected, old.num_selected)]
        for there, here in pairs:
            target.device.hop(there, here, origin.device)

    def _count(self, batch: Batch, inputs: list[tuple[View, PassInputs]], complete: frozenset[int]) -> None:
        """Count the choices of layers that did not ask the host."""
        for part, (_, own) in zip(self.parts, inputs, strict=True):
            layers = [(index, layer) for index, layer in enumerate(part.layers) if layer in complete]
            if layers:
                choices = np.empty(own.ids.shape, np.int32)
                part.device.fetch(choices, own.ids).synchronize()
                for index, layer in layers:
                    self.store.count_resident(layer, choices[index], batch.phase)


def _pieces(parts: list[DevicePart]) -> list[_Piece]:
    """The work of a pass, in order: the ends' device embeds, each runs its layers, the ends' device makes logits."""
    ends = next(part for part in parts if part.ends is not None)
    pieces: list[_Piece] = []
    for part, step in [(ends, "embed"), *((part, "layers") for part in parts if part.layers), (ends, "head")]:
        if pieces and pieces[-1].part is part:
            pieces[-1].steps.append(step)
        else:
            pieces.append(_Piece(part, pieces[-1].part if pieces else None, [step]))
    return pieces
