"""One device's part of a model: its layers, the memory that a pass works in, and graphs of passes seen before."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_gpu.batch import Batch, Phase
from glm_gpu.config import ModelConfig
from glm_gpu.device import NUMPY_DTYPES, Arena, Device, aligned
from glm_gpu.kernels.gpu.arrays import ITEM_BYTES, Array, DeviceMatrix, View, num_items
from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.kernels.gpu.projection import embed, project
from glm_gpu.kernels.rope import rope_tables
from glm_gpu.model.device_experts import CompleteLayer, SteppedLayer
from glm_gpu.model.device_layer import HALF, PassInputs, Place, decoder_layer, rows_of
from glm_gpu.model.weights import LayerWeights, MoeWeights
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
class PassShape:
    """What the launches of a pass depend on, beside what is in memory.

    Attributes:
        num_rows: T.
        max_count: bound of the positions that a row sees, rounded up so that few passes differ.
        is_sparse: whether positions are selected.
        logit_runs: (start, stop) of consecutive rows whose logits are wanted.
    """

    num_rows: int
    max_count: int
    is_sparse: bool
    logit_runs: tuple[tuple[int, int], ...]


def pass_shape(batch: Batch, config: ModelConfig) -> PassShape:
    """The shape of a batch's pass."""
    longest = int(batch.positions.max()) + 1
    is_sparse = config.is_latent and longest > config.index_topk
    return PassShape(len(batch.token_ids), rounded_count(longest), is_sparse, _runs(batch.logits_at.tolist()))


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
    """

    def __init__(self, config: ModelConfig, num_layers: int, max_rows: int, arena: Arena) -> None:
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

    def feed(self, batch: Batch, shape: PassShape, addresses: Sequence[int]) -> tuple[View, PassInputs]:
        """Queue a batch's numbers; the token ids, and the other inputs.

        Args:
            addresses: where the cache of each of the batch's spans begins on this device.
        """
        caches = np.empty(shape.num_rows, np.int64)
        for span, address in zip(batch.spans, addresses, strict=True):
            caches[span.rows] = address
        cos, sin = rope_tables(batch.positions, self.config.rope_theta, 2 * self._half)
        values = (batch.token_ids, batch.positions, batch.positions + 1, caches, cos, sin)
        views, position = self.inputs(shape.num_rows)
        for view, value in zip(views.values(), values, strict=True):
            start = view.ptr - self._feed.ptr
            array = self._staged[start : start + view.nbytes].view(NUMPY_DTYPES[view.dtype])
            array[...] = value.reshape(-1)
        feed = View(self._feed.ptr, (position,), "u8")
        self.arena.device.load(feed, self._staged[:position], self.arena.device.compute)
        return self.described(shape)

    def inputs(self, num_rows: int) -> tuple[dict[str, View], int]:
        """Where a pass of so many rows has its numbers, and how many bytes they are."""
        views, position = {}, 0
        for name, (size, dtype) in self._fields(num_rows).items():
            views[name] = View(self._feed.ptr + position, size, dtype)
            position += aligned(views[name].nbytes)
        return views, position

    def described(self, shape: PassShape) -> tuple[View, PassInputs]:
        """The token ids and the other inputs of a pass, by address."""
        num_rows = shape.num_rows
        views, _ = self.inputs(num_rows)
        token_ids = views.pop("token_ids")
        ids = View(self._ids.ptr, (self._num_layers, num_rows, self._ids.shape[2]), "i32")
        selected = rows_of(self._selected, 0, num_rows)
        return token_ids, PassInputs(
            num_rows,
            shape.max_count,
            shape.is_sparse,
            **views,
            selected=selected,
            num_selected=rows_of(self._num_selected, 0, num_rows),
            ids=ids,
        )

    def _fields(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {
            "token_ids": ((num_rows,), "i32"),
            "positions": ((num_rows,), "i32"),
            "counts": ((num_rows,), "i32"),
            "caches": ((num_rows,), "i64"),
            "cos": ((num_rows, self._half), "f32"),
            "sin": ((num_rows, self._half), "f32"),
        }


class DevicePart:
    """Layers on one device, run one after the other over a residual stream there.

    Args:
        layers: weights by the layer's number.
        offsets: of each layer's streams in a sequence's cache.
        ends: where this is the device that has them.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        layers: dict[int, LayerWeights],
        offsets: Sequence[dict[str, int]],
        ends: Ends | None,
        workspace: Workspace,
    ) -> None:
        self.device, self.config, self.layers, self.ends = device, config, layers, ends
        self.workspace, self._offsets = workspace, offsets

    def embed(self, token_ids: View) -> None:
        """The residual stream begins."""
        assert self.ends is not None
        embed(self.device.launcher, token_ids, self.ends.embedding, self._x(token_ids.shape[0]))

    def run_layers(self, inputs: PassInputs, store: DeviceStore, phase: Phase, is_reaching: bool) -> list[int]:
        """Queue all layers; where experts are missing, waits for each layer's choice.

        Args:
            is_reaching: kernels can reach all experts, pinned host memory included, and shall.

        Returns:
            The layers that were complete, whose choices the host has not seen.
        """
        complete = []
        place = Place(self.config, self.device.launcher, self.workspace.scratch())
        x = self._x(inputs.num_rows)
        for index, (layer, weights) in enumerate(self.layers.items()):
            experts = ids = None
            if isinstance(weights.mlp, MoeWeights):
                ids = View(rows_of(inputs.ids, index, index + 1).ptr, inputs.ids.shape[1:], "i32")
                tier = store.tier_of(layer)
                table = tier.reach if is_reaching else tier.table
                if table.is_complete(layer):
                    complete.append(layer)
                    experts = CompleteLayer(store.layout(layer), table.row(layer))
                else:
                    experts = SteppedLayer(store, layer, phase)
            decoder_layer(x, weights, place, inputs, self._offsets[layer], experts, ids)
        return complete

    def head(self, shape: PassShape) -> tuple[View, list[View]]:
        """Hidden states behind the final norm, [T, D] f32, and logits of each run of rows, [n, V] f32."""
        hidden, split = self.finish(shape.num_rows)
        return hidden, [self.logits(split, start, stop) for start, stop in shape.logit_runs]

    def finish(self, num_rows: int) -> tuple[View, View]:
        """Hidden states behind the final norm, [T, D] f32, and as products take them."""
        assert self.ends is not None
        scratch, size = self.workspace.scratch(), (num_rows, self.config.hidden_size)
        hidden, split = scratch.take(size, "f32"), scratch.take(size, HALF)
        rms_norm(
            self.device.launcher,
            self._x(num_rows),
            self.ends.norm,
            self.config.rms_norm_eps,
            out=hidden,
            split=split,
        )
        return hidden, split

    def logits(self, split: View, start: int, stop: int) -> View:
        """Logits of consecutive rows, [n, V] f32, in scratch memory."""
        assert self.ends is not None
        logits = self.workspace.arena.take((stop - start, self.config.vocab_size), "f32")
        project(self.device.launcher, rows_of(split, start, stop), self.ends.head, logits)
        return logits

    def _x(self, num_rows: int) -> View:
        return rows_of(self.workspace.x, 0, num_rows)
