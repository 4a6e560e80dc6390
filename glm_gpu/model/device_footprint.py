"""What a pass takes in a device's memory, found by a dry run: the launches of a real pass, with nobody to run them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.device import NUMPY_DTYPES, Arena
from glm_gpu.kernels.gpu.arrays import DeviceMatrix, Launcher, View
from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.model.device_layer import Compute, Place, decoder_layer, draft_input
from glm_gpu.model.device_part import LOGIT_ROWS, DevicePart, Ends, PassShape, Workspace, rounded_count
from glm_gpu.model.weights import MoeWeights, read_layer, read_mtp
from glm_gpu.quant import Format
from glm_gpu.recipe import Recipe
from glm_gpu.slab import SlabLayout
from glm_gpu.tensors import expected_tensors
from glm_gpu.tiers.store import MAX_PREFETCH_ROWS

_UNLIMITED = 1 << 60


def device_pass_bytes(config: ModelConfig, num_rows: int, context: int, with_mtp: bool = False) -> int:
    """The most that passes of up to `num_rows` rows take on a device, inputs and places for results included.

    Args:
        context: positions in the cache once the pass is done.
        with_mtp: passes of the multi-token layer too.
    """
    return dry_run(config, num_rows, context, _Nobody(), Recipe.from_bits(16, 16, 0), with_mtp=with_mtp)


def dry_run(
    config: ModelConfig,
    num_rows: int,
    context: int,
    launcher: Launcher,
    recipe: Recipe,
    scale_dtype: str = "f32",
    with_mtp: bool = False,
) -> int:
    """Launch what a pass on a device launches, for one layer of each kind, with addresses where nothing lies.

    Args:
        context: positions in the cache once the pass is done.
        launcher: must not look behind an address.
        recipe: the formats of weights.
        scale_dtype: "f32" or "f16".
        with_mtp: the multi-token layer's launches too.

    Returns:
        Bytes that the pass takes on the device, inputs and places for results included.
    """
    device: Any = SimpleNamespace(
        launcher=launcher, allocate=lambda num_bytes: 0, host_array=lambda shape, dtype: np.empty(0, dtype)
    )
    arena = Arena(device, _UNLIMITED)
    workspace = Workspace(config, config.num_hidden_layers + 1, num_rows, arena, has_draft=with_mtp)
    is_sparse = config.is_latent and context > config.index_topk
    shape = PassShape(num_rows, rounded_count(context), is_sparse, ())
    _, inputs = workspace.described(shape)
    shapes = expected_tensors(config)

    def formats(name: str) -> tuple[Format, str]:
        return recipe.format_for(name, config), scale_dtype

    scale_type = np.dtype(NUMPY_DTYPES[scale_dtype])
    x, ids = View(0, (num_rows, config.hidden_size), "f32"), View(0, (num_rows, config.num_experts_per_tok), "i32")

    def run(weights: Any, expert: Format) -> None:
        layout = SlabLayout(expert, config.hidden_size, config.moe_intermediate_size, scale_type)
        place = Place(config, device.launcher, workspace.scratch())
        offsets = dict.fromkeys(("latent", "index_key", "key", "value"), 0)
        is_guessing = isinstance(weights.mlp, MoeWeights) and num_rows <= MAX_PREFETCH_ROWS
        decoder_layer(x, weights, place, inputs, offsets, _Experts(layout), ids, weights if is_guessing else None)

    for layer in _kinds(config):
        run(read_layer(_Shapes(shapes, f"model.layers.{layer}.", formats), config, layer), recipe.expert)
    if with_mtp:
        mtp: Any = read_mtp(_Shapes(shapes, f"model.layers.{config.mtp_layer}.", formats), config)
        draft_input(x, inputs.hidden, mtp, Place(config, device.launcher, workspace.scratch()))
        run(mtp.layer, recipe.mtp_expert)
        rms_norm(launcher, x, mtp.head_norm, config.rms_norm_eps, out=x)
    vocabulary = config.vocab_size, config.hidden_size
    embedding, head = (_matrix(vocabulary, *formats(name)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    norm = View(0, (config.hidden_size,), "f32")
    part = DevicePart(device, config, {}, (), Ends(embedding, norm, head), workspace)
    part.embed(View(0, (num_rows,), "i32"))
    for is_normed in (False, True) if with_mtp else (False,):
        _, split = part.finish(num_rows, is_normed)
        marked = workspace.arena.used_bytes
        for only_best in (False, True):
            part.choices(split, 0, min(num_rows, LOGIT_ROWS), only_best)
            workspace.arena.cut(marked)
    return arena.peak_bytes


def _kinds(config: ModelConfig) -> Sequence[int]:
    """One layer of each kind: those of a kind take the same."""
    kinds: dict[tuple[bool, bool], int] = {}
    for layer in range(config.num_hidden_layers):
        is_full = config.is_latent and config.is_full_indexer(layer)
        kinds.setdefault((config.is_sparse(layer), is_full), layer)
    return list(kinds.values())


class _Nobody:
    """A launcher that runs nothing."""

    def launch(self, *launch: Any) -> None:
        pass


class _Experts:
    """All experts, at once."""

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout

    def chosen(self, ids: View, guess: View | None) -> None:
        pass

    def compute_resident(self, compute: Compute) -> None:
        compute(View(0, (1,), "i64"))

    def compute_missing(self, compute: Compute) -> None:
        pass


class _Shapes:
    """Reads weights as `glm_gpu.model.weights` wants them, of the right shapes and without memory."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], prefix: str, formats: Callable[[str], tuple[Format, str]]
    ) -> None:
        self._shapes, self._prefix, self._formats = shapes, prefix, formats

    def under(self, prefix: str) -> "_Shapes":
        return _Shapes(self._shapes, self._prefix + prefix, self._formats)

    def has(self, name: str) -> bool:
        return self._prefix + name in self._shapes

    def matrix(self, name: str) -> DeviceMatrix:
        full_name = f"{self._prefix}{name}.weight"
        return _matrix(self._shapes[full_name], *self._formats(full_name))

    def vector(self, name: str) -> View:
        return View(0, self._shapes[self._prefix + name], "f32")


def _matrix(shape: tuple[int, int], format: Format, scale_dtype: str) -> DeviceMatrix:
    num_rows, num_columns = shape
    if not format.is_packed:
        return DeviceMatrix(format, shape, View(0, shape, format.name))
    scales = View(0, (num_rows, format.num_groups(num_columns)), scale_dtype)
    return DeviceMatrix(format, shape, View(0, (num_rows, format.row_bytes(num_columns)), "u8"), scales)
