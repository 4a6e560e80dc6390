"""One device's part of a model: its layers, the memory that a pass works in, and graphs of passes seen before."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.device import NUMPY_DTYPES, Arena, Device, aligned
from glm_gpu.kernels.gpu.arrays import ITEM_BYTES, Array, DeviceMatrix, View, num_items
from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.kernels.gpu.projection import embed, project
from glm_gpu.kernels.gpu.sampling import argmax, num_blocks
from glm_gpu.kernels.rope import rope_tables
from glm_gpu.model.device_experts import CompleteLayer, SteppedLayer
from glm_gpu.model.device_layer import HALF, PassInputs, Place, decoder_layer, draft_input, rows_of
from glm_gpu.model.indexer import Selection
from glm_gpu.model.weights import LayerWeights, MoeWeights, MtpWeights
from glm_gpu.tiers.device_store import DeviceStore

# Logits of so many rows are in memory at once.
LOGIT_ROWS = 64


@dataclass(frozen=True)
class Ends:
    """Embedding, final norm and head, on one of the devices."""

    embedding: DeviceMatrix
    norm: Array
    head: DeviceMatrix


@dataclass(frozen=True)
class Draft:
    """The multi-token layer's weights on a device, and where the streams of a sequence lie in its cache."""

    weights: MtpWeights
    offsets: dict[str, int]


@dataclass(frozen=True)
class PassShape:
    """What the launches of a pass depend on, beside what is in memory.

    Attributes:
        num_rows: T.
        max_count: bound of the positions that a row sees, rounded up so that few passes differ.
        is_sparse: whether rows attend to selected positions.
        logit_runs: (start, stop) of consecutive rows whose logits are wanted.
        only_best: of those logits, the best tokens' ids.
        is_given: what rows attend to was settled before the pass; no layer selects.
    """

    num_rows: int
    max_count: int
    is_sparse: bool
    logit_runs: tuple[tuple[int, int], ...]
    only_best: bool = False
    is_given: bool = False


def pass_shape(batch: Batch, config: ModelConfig, given: Sequence[Selection] | None = None) -> PassShape:
    """The shape of a batch's pass.

    Args:
        given: what each span's rows attend to; None where layers find out.
    """
    longest = int(batch.positions.max()) + 1
    is_sparse = config.is_latent and longest > config.index_topk if given is None else given[0].rows is not None
    runs = _runs(batch.logits_at.tolist())
    return PassShape(
        len(batch.token_ids), rounded_count(longest), is_sparse, runs, batch.only_best, is_given=given is not None
    )


def rounded_count(count: int) -> int:
    """Positions rounded up to a power of two, at least 256: how far grids of attention reach."""
    return max(256, 1 << (count - 1).bit_length())


def _runs(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive rows, at most LOGIT_ROWS together."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row and row - runs[-1][0] < LOGIT_ROWS:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return tuple(runs)


class Workspace:
    """Memory that passes work in, on one device, and their inputs in it.

    Args:
        num_layers: how many of the device's layers have a place for the experts chosen.
        max_rows: T at most.
        arena: as large as `glm_gpu.model.device_footprint` says.
        has_draft: the multi-token layer is among them, whose passes take hidden states too.
    """

    def __init__(
        self, config: ModelConfig, num_layers: int, max_rows: int, arena: Arena, has_draft: bool = False
    ) -> None:
        self._has_draft = has_draft
        self.config, self.arena, self.max_rows, self._num_layers = config, arena, max_rows, num_layers
        self.x = arena.take((max_rows, config.hidden_size), "f32")
        self._selected = arena.take((max_rows, max(1, config.index_topk)), "i32")
        self._num_selected = arena.take((max_rows,), "i32")
        self._ids = arena.take((num_layers, max_rows, config.num_experts_per_tok), "i32")
        self._half = (config.qk_rope_head_dim or config.head_dim) // 2
        fields = self._fields(max_rows)
        num_bytes = sum(aligned(num_items(shape) * ITEM_BYTES[dtype]) for shape, dtype in fields.values())
        self._feed = arena.take((num_bytes,), "u8")
        self._staged = arena.device.host_array((num_bytes,), np.uint8)
        self._scratch = arena.used_bytes

    def scratch(self) -> Arena:
        """The rest of the arena, empty: at the same addresses in every pass."""
        self.arena.cut(self._scratch)
        return self.arena

    def feed(
        self,
        batch: Batch,
        shape: PassShape,
        addresses: Sequence[int],
        hidden: np.ndarray | None = None,
        given: Sequence[Selection] | None = None,
    ) -> tuple[View, PassInputs]:
        """Queue a batch's numbers; the token ids, and the other inputs.

        Args:
            addresses: where the cache of each of the batch's spans begins on this device.
            hidden: [T, D] f32, for the multi-token layer, on a device that has it.
            given: what each span's rows attend to, in a pass in which no layer selects.
        """
        caches = np.empty(shape.num_rows, np.int64)
        for span, address in zip(batch.spans, addresses, strict=True):
            caches[span.rows] = address
        cos, sin = rope_tables(batch.positions, self.config.rope_theta, 2 * self._half)
        counts = batch.positions + 1 if given is None else np.concatenate([selection.counts for selection in given])
        values = [batch.token_ids, batch.positions, counts, caches, cos, sin]
        values += [] if hidden is None else [hidden]
        views, stop = self._inputs(shape.num_rows), 0
        for view, value in zip(views.values(), values, strict=False):
            start = view.ptr - self._feed.ptr
            stop = start + view.nbytes
            array = self._staged[start:stop].view(NUMPY_DTYPES[view.dtype])
            array[...] = value.reshape(-1)
        feed = View(self._feed.ptr, (stop,), "u8")
        device = self.arena.device
        device.load(feed, self._staged[:stop], device.compute)
        if given is not None and shape.is_sparse:
            self._give(given, counts)
        return self.described(shape)

    def _give(self, given: Sequence[Selection], counts: np.ndarray) -> None:
        """Queue the positions that rows attend to; waits until they are there."""
        device, num_rows = self.arena.device, len(counts)
        rows = np.full((num_rows, self._selected.shape[1]), -1, np.int32)
        first = 0
        for selection in given:
            rows[first : first + len(selection.rows), : selection.rows.shape[1]] = selection.rows
            first += len(selection.rows)
        device.load(rows_of(self._selected, 0, num_rows), rows, device.compute)
        device.load(rows_of(self._num_selected, 0, num_rows), counts.astype(np.int32), device.compute)
        device.compute.synchronize()

    def _inputs(self, num_rows: int) -> dict[str, View]:
        """Where a pass of so many rows has its numbers."""
        views, position = {}, 0
        for name, (size, dtype) in self._fields(num_rows).items():
            views[name] = View(self._feed.ptr + position, size, dtype)
            position += aligned(views[name].nbytes)
        return views

    def described(self, shape: PassShape) -> tuple[View, PassInputs]:
        """The token ids and the other inputs of a pass, by address."""
        num_rows = shape.num_rows
        views = self._inputs(num_rows)
        token_ids = views.pop("token_ids")
        ids = View(self._ids.ptr, (self._num_layers, num_rows, self._ids.shape[2]), "i32")
        selected = rows_of(self._selected, 0, num_rows)
        return token_ids, PassInputs(
            num_rows,
            shape.max_count,
            shape.is_sparse,
            shape.is_given,
            **views,
            selected=selected,
            num_selected=rows_of(self._num_selected, 0, num_rows),
            ids=ids,
        )

    def _fields(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        hidden = {"hidden": ((num_rows, self.config.hidden_size), "f32")}
        return {
            "token_ids": ((num_rows,), "i32"),
            "positions": ((num_rows,), "i32"),
            "counts": ((num_rows,), "i32"),
            "caches": ((num_rows,), "i64"),
            "cos": ((num_rows, self._half), "f32"),
            "sin": ((num_rows, self._half), "f32"),
        } | (hidden if self._has_draft else {})


class DevicePart:
    """Layers on one device, run one after the other over a residual stream there.

    Args:
        layers: weights by the layer's number.
        offsets: of each layer's streams in a sequence's cache.
        ends: where this is the device that has them.
        draft: the multi-token layer, where it is on this device.

    Attributes:
        numbers: of its layers, the multi-token one's included, in the order of `PassInputs.ids`.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        layers: dict[int, LayerWeights],
        offsets: Sequence[dict[str, int]],
        ends: Ends | None,
        workspace: Workspace,
        draft: Draft | None = None,
    ) -> None:
        self.device, self.config, self.layers, self.ends, self.draft = device, config, layers, ends, draft
        self.workspace, self._offsets = workspace, offsets
        self.numbers = [*layers, *([] if draft is None else [config.mtp_layer])]

    def embed(self, token_ids: View) -> None:
        """The residual stream begins."""
        assert self.ends is not None
        embed(self.device.launcher, token_ids, self.ends.embedding, self._x(token_ids.shape[0]))

    def run_layers(self, inputs: PassInputs, store: DeviceStore, num_decode: int, is_reaching: bool) -> list[int]:
        """Queue all layers; where experts are missing, waits for each layer's choice.

        Args:
            num_decode: the first so many rows are of answers.
            is_reaching: kernels can reach all experts, pinned host memory included, and shall.

        Returns:
            The layers that were complete, whose choices the host has not seen.
        """
        place = self._place()
        run = LayerRun(self._x(inputs.num_rows), place, inputs, store, num_decode, is_reaching)
        for layer, following in zip_longest(self.layers, [*self.layers][1:]):
            self._run_layer(run, layer, self.layers[layer], self._offsets[layer], following)
        return run.complete

    def run_draft(self, inputs: PassInputs, store: DeviceStore, num_decode: int, is_reaching: bool) -> list[int]:
        """Queue the multi-token layer over embeddings in the residual stream and the hidden states of the inputs.

        Leaves the states behind the layer's own norm in the stream. Arguments and result as of `run_layers`.
        """
        assert self.draft is not None and inputs.hidden is not None
        weights, x, place = self.draft.weights, self._x(inputs.num_rows), self._place()
        draft_input(x, inputs.hidden, weights, place)
        run = LayerRun(x, place, inputs, store, num_decode, is_reaching)
        self._run_layer(run, self.config.mtp_layer, weights.layer, self.draft.offsets)
        rms_norm(self.device.launcher, x, weights.head_norm, self.config.rms_norm_eps, out=x)
        return run.complete

    def _run_layer(
        self,
        run: "LayerRun",
        layer: int,
        weights: LayerWeights,
        offsets: dict[str, int],
        following: int | None = None,
    ) -> None:
        experts = ids = upcoming = None
        if following is not None and not run.guesses(following, self.layers[following]):
            following = None
        if isinstance(weights.mlp, MoeWeights):
            index, of_pass = self.numbers.index(layer), run.inputs.ids
            ids = View(rows_of(of_pass, index, index + 1).ptr, of_pass.shape[1:], "i32")
            experts = run.experts(layer, following)
            upcoming = None if experts.following is None else self.layers[experts.following]
        decoder_layer(run.x, weights, run.place, run.inputs, offsets, experts, ids, upcoming)

    def _place(self) -> Place:
        return Place(self.config, self.device.launcher, self.workspace.scratch())

    def head(self, shape: PassShape, is_normed: bool) -> tuple[View, list[View]]:
        """Hidden states behind the final norm, [T, D] f32, and what each run of rows is chosen from: see `choices`.

        Args:
            is_normed: as in `finish`.
        """
        hidden, split = self.finish(shape.num_rows, is_normed)
        return hidden, [self.choices(split, start, stop, shape.only_best) for start, stop in shape.logit_runs]

    def finish(self, num_rows: int, is_normed: bool) -> tuple[View, View]:
        """Hidden states behind the final norm, [T, D] f32, and as products take them.

        Args:
            is_normed: the residual stream has been through a norm of its own already.
        """
        assert self.ends is not None
        scratch, size = self.workspace.scratch(), (num_rows, self.config.hidden_size)
        x, launcher, eps = self._x(num_rows), self.device.launcher, self.config.rms_norm_eps
        hidden, split = x if is_normed else scratch.take(size, "f32"), scratch.take(size, HALF)
        if is_normed:
            rms_norm(launcher, x, None, eps, split=split)
        else:
            rms_norm(launcher, x, self.ends.norm, eps, out=hidden, split=split)
        return hidden, split

    def choices(self, split: View, start: int, stop: int, only_best: bool) -> View:
        """Logits of consecutive rows, [n, V] f32, or each one's best token, [n] i32; in scratch memory."""
        assert self.ends is not None
        arena, launcher, num_rows = self.workspace.arena, self.device.launcher, stop - start
        logits = arena.take((num_rows, self.config.vocab_size), "f32")
        project(launcher, rows_of(split, start, stop), self.ends.head, logits)
        if not only_best:
            return logits
        blocks = num_rows, num_blocks(self.config.vocab_size)
        ids = arena.take((num_rows,), "i32")
        argmax(launcher, logits, arena.take(blocks, "f32"), arena.take(blocks, "i32"), ids)
        return ids

    def _x(self, num_rows: int) -> View:
        return rows_of(self.workspace.x, 0, num_rows)


@dataclass
class LayerRun:
    """Layers of one pass on one device, while they are queued.

    Attributes:
        num_decode: the first so many rows are of answers.
        is_reaching: kernels can reach all experts, pinned host memory included, and shall.
        complete: the layers so far whose experts were all at hand.
    """

    x: View
    place: Place
    inputs: PassInputs
    store: DeviceStore
    num_decode: int
    is_reaching: bool
    complete: list[int] = field(default_factory=list)

    def guesses(self, layer: int, weights: LayerWeights) -> bool:
        """Whether the experts of a layer shall be guessed in the one before it."""
        is_sparse = isinstance(weights.mlp, MoeWeights)
        return is_sparse and not self.is_reaching and self.store.wants_prefetch(layer, self.inputs.num_rows)

    def experts(self, layer: int, following: int | None) -> CompleteLayer | SteppedLayer:
        """A sparse layer's experts: all at hand, or some still to come.

        Args:
            following: the next layer, if its experts are guessed in this one.
        """
        store = self.store
        tier = store.tier_of(layer)
        table = tier.reach if self.is_reaching else tier.table
        if not table.is_complete(layer):
            return SteppedLayer(store, layer, self.num_decode, following)
        self.complete.append(layer)
        return CompleteLayer(store.layout(layer), table.row(layer))
