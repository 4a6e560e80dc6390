"""A chain of work through devices: launched piece by piece, or replayed from graphs once its shape has come before."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.device import Graph
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.model.device_layer import PassInputs, rows_of
from glm_gpu.model.device_part import DevicePart, PassShape
from glm_gpu.model.transformer import Output
from glm_gpu.tiers.device_store import DeviceStore

# Passes of up to so many rows are replayed from graphs: decoding, and verification of drafts.
MAX_GRAPH_ROWS = 16
# Graphs kept at a time; each shape of a pass has its own, about 1 MB.
MAX_GRAPHS = 32

# What a part does in a chain: embed the tokens, run its layers or the multi-token layer, turn states into logits.
Step = Literal["embed", "layers", "draft", "head", "draft head"]
# Token ids and the other inputs of a pass in the memory of one part.
Feed = tuple[View, PassInputs]


@dataclass
class _Piece:
    """Work on one device without a break: what to queue, and where the stream of hidden states comes from."""

    part: DevicePart
    origin: DevicePart | None
    steps: list[Step]


@dataclass(frozen=True)
class _Captured:
    """A pass that can be replayed: a graph for each piece, and where results lie afterwards."""

    graphs: list[Graph]
    hidden: View
    choices: list[View]


class Chain:
    """What a pass runs on devices, in order. Each holds whole layers; hidden states hop from one to the next.

    A pass in which the host has nothing to decide is recorded as one graph a device the second time its shape comes,
    and replayed from then on; another is queued layer by layer. Both launch the same kernels on the same memory.

    Args:
        steps: each with the part that does it; the last one is a head.

    Attributes:
        parts: those of the steps, each once.
    """

    def __init__(self, config: ModelConfig, store: DeviceStore, steps: Sequence[tuple[DevicePart, Step]]) -> None:
        self.config, self._store = config, store
        self.parts = list(dict.fromkeys(part for part, _ in steps))
        self._pieces = _pieces(steps)
        self._has_draft = any(step == "draft" for _, step in steps)
        self._sparse = [
            layer
            for part, step in steps
            for layer in (part.layers if step == "layers" else [config.mtp_layer] if step == "draft" else [])
            if config.is_sparse(layer)
        ]
        self._seen: set[PassShape] = set()
        self._graphs: dict[PassShape, _Captured] = {}

    @property
    def num_graphs(self) -> int:
        """Shapes of passes that are replayed now."""
        return len(self._graphs)

    def forget_graphs(self) -> None:
        """Give back what recorded passes take."""
        self._graphs.clear()

    def settle(self) -> None:
        """Wait for whatever is queued, whether it fails or not: it must not meet the numbers of the next pass."""
        for part in self.parts:
            with suppress(RuntimeError):
                part.device.compute.synchronize()

    def run(self, batch: Batch, shape: PassShape, feeds: Sequence[Feed]) -> Output:
        """Run a pass; waits for its results.

        Args:
            feeds: one a part, on its way to that device already.
        """
        is_reaching = shape.num_rows <= MAX_GRAPH_ROWS and self._store.is_reachable()
        captured = self._captured(shape, feeds) if is_reaching and len(shape.logit_runs) == 1 else None
        if captured is None:
            output, complete = self._step(batch, shape, feeds, is_reaching)
        else:
            output, complete = self._replay(captured, shape, feeds), self._sparse
        self._count(batch, feeds, frozenset(complete))
        return output

    def _step(
        self, batch: Batch, shape: PassShape, feeds: Sequence[Feed], is_reaching: bool
    ) -> tuple[Output, list[int]]:
        """Queue everything launch by launch; the result, and the layers whose choices the host has not seen yet."""
        complete: list[int] = []
        for piece in self._pieces:
            self._hop(piece, shape, feeds)
            with piece.part.device.computing():
                complete += self._queue(piece, feeds, batch.num_decode, is_reaching)
        part, row, num = self._pieces[-1].part, 0, len(batch.logits_at)
        choices = np.empty(num, np.int32) if shape.only_best else np.empty((num, self.config.vocab_size), np.float32)
        hidden = np.empty((shape.num_rows, self.config.hidden_size), np.float32)
        with part.device.computing():
            normed, split = part.finish(shape.num_rows, self._has_draft)
            marked = part.workspace.arena.used_bytes
            for start, stop in shape.logit_runs:
                part.device.fetch(choices[row : row + stop - start], part.choices(split, start, stop, shape.only_best))
                part.workspace.arena.cut(marked)
                row += stop - start
            part.device.fetch(hidden, normed).synchronize()
        return _output(choices, hidden, shape), complete

    def _queue(self, piece: _Piece, feeds: Sequence[Feed], num_decode: int, is_reaching: bool) -> list[int]:
        """Launch a piece's embedding and layers; the layers whose choices the host has not seen."""
        token_ids, own = feeds[self.parts.index(piece.part)]
        complete: list[int] = []
        for step in piece.steps:
            if step == "embed":
                piece.part.embed(token_ids)
            elif step == "layers":
                complete = piece.part.run_layers(own, self._store, num_decode, is_reaching)
            elif step == "draft":
                complete = piece.part.run_draft(own, self._store, num_decode, is_reaching)
        return complete

    def _captured(self, shape: PassShape, feeds: Sequence[Feed]) -> _Captured | None:
        """The graphs of a pass that is decided already, made when its shape comes a second time."""
        for tier in self._store.tiers:  # graphs hold kernels only: tables are brought up to date before
            for layer in tier.layers:
                tier.reach.row(layer)
        if shape not in self._graphs:
            if shape not in self._seen:
                self._seen.add(shape)
                return None
            self._graphs[shape] = self._capture(shape, feeds)
            if len(self._graphs) > MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return self._graphs[shape]

    def _capture(self, shape: PassShape, feeds: Sequence[Feed]) -> _Captured:
        results: list[tuple[View, list[View]]] = []

        def work(piece: _Piece) -> None:
            self._queue(piece, feeds, num_decode=shape.num_rows, is_reaching=True)
            if piece is self._pieces[-1]:
                results.append(piece.part.head(shape, self._has_draft))

        graphs = [piece.part.device.capture(partial(work, piece)) for piece in self._pieces]
        return _Captured(graphs, *results[0])

    def _replay(self, captured: _Captured, shape: PassShape, feeds: Sequence[Feed]) -> Output:
        for graph, piece in zip(captured.graphs, self._pieces, strict=True):
            self._hop(piece, shape, feeds)
            with piece.part.device.computing():
                graph.replay()
        device, (choices,) = self._pieces[-1].part.device, captured.choices
        found = np.empty(choices.shape, np.int32 if shape.only_best else np.float32)
        hidden = np.empty(captured.hidden.shape, np.float32)
        device.fetch(found, choices)
        device.fetch(hidden, captured.hidden).synchronize()
        return _output(found, hidden, shape)

    def _hop(self, piece: _Piece, shape: PassShape, feeds: Sequence[Feed]) -> None:
        """Bring the hidden states, and the positions selected, from the device that had them last."""
        origin, target = piece.origin, piece.part
        if origin is None or origin is target:
            return
        num_rows = shape.num_rows
        pairs = [(rows_of(target.workspace.x, 0, num_rows), rows_of(origin.workspace.x, 0, num_rows))]
        if shape.is_sparse and not self._has_draft:
            new, old = (feeds[self.parts.index(part)][1] for part in (target, origin))
            pairs += [(new.selected, old.selected), (new.num_selected, old.num_selected)]
        for there, here in pairs:
            target.device.hop(there, here, origin.device)

    def _count(self, batch: Batch, feeds: Sequence[Feed], complete: frozenset[int]) -> None:
        """Count the choices of layers that did not ask the host."""
        for part, (_, own) in zip(self.parts, feeds, strict=True):
            layers = [layer for layer in part.numbers if layer in complete]
            if layers:
                choices = np.empty(own.ids.shape, np.int32)
                part.device.fetch(choices, own.ids).synchronize()
                for layer in layers:
                    self._store.count_resident(layer, choices[part.numbers.index(layer)], batch.num_decode)


def _output(choices: np.ndarray, hidden: np.ndarray, shape: PassShape) -> Output:
    return Output(None, hidden, choices) if shape.only_best else Output(choices, hidden)


def _pieces(steps: Sequence[tuple[DevicePart, Step]]) -> list[_Piece]:
    """Steps in a row on one device are one piece."""
    pieces: list[_Piece] = []
    for part, step in steps:
        if pieces and pieces[-1].part is part:
            pieces[-1].steps.append(step)
        else:
            pieces.append(_Piece(part, pieces[-1].part if pieces else None, [step]))
    return pieces
