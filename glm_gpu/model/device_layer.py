"""One decoder layer on a device: what `glm_gpu.model.layer` does, as launches into memory that is there already."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from glm_gpu.config import ModelConfig
from glm_gpu.device import Arena
from glm_gpu.kernels.gpu.arrays import Array, Launcher, View, num_items
from glm_gpu.kernels.gpu.attention import attend_heads, attend_latent, parts_shape
from glm_gpu.kernels.gpu.experts import (
    combine,
    expert_hidden,
    expert_output,
    max_tiles,
    mlp_hidden,
    plan_tiles,
    rows_per_tile,
)
from glm_gpu.kernels.gpu.indexer import index_scores, select_top
from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.kernels.gpu.product import BLOCK_M
from glm_gpu.kernels.gpu.projection import absorb_query, expand_value, project, project_both, project_onto
from glm_gpu.kernels.gpu.router import num_parts, project_f32, route
from glm_gpu.kernels.gpu.rows import append, append_index_key, append_latent, rope
from glm_gpu.model.numerics import INDEX_NORM_EPS, LATENT_NORM_EPS
from glm_gpu.model.weights import (
    HeadAttentionWeights,
    IndexerWeights,
    LatentAttentionWeights,
    LayerWeights,
    MlpWeights,
    MoeWeights,
    MtpWeights,
)
from glm_gpu.slab import SlabLayout

# Activations that products take, and cached rows.
HALF = "bf16"
# Rows attend in slices, so that the partial sums of a slice stay below this.
MAX_PARTS_BYTES = 64 << 20

# Computes the experts of a layer that have an address in a table: [E] i64.
Compute = Callable[[View], None]


class LayerExperts(Protocol):
    """The routed experts of one layer in one pass."""

    layout: SlabLayout

    def chosen(self, ids: View, guess: View | None) -> None:
        """The router's choice, [T, K] i32, is queued, and a guess of the next sparse layer's."""

    def compute_resident(self, compute: Compute) -> None:
        """Queue the experts that need not be moved first; never waits."""

    def compute_missing(self, compute: Compute) -> None:
        """Queue the others, as they arrive. Waits for the choice, unless none can be missing."""


@dataclass(frozen=True)
class PassInputs:
    """What a pass is about, in the memory of one device.

    Attributes:
        num_rows: T.
        max_count: no row attends to more positions; grids are made for it.
        is_sparse: some row sees more than `index_topk` positions, so that positions are selected.
        is_given: what rows attend to is settled, in `counts` or in `selected` and `num_selected`: no layer selects.
        positions, counts: [T] i32; counts are positions + 1.
        cos, sin: [T, P / 2] f32.
        caches: [T] i64, where the cache of each row's sequence begins.
        selected, num_selected: [T, index_topk] and [T] i32, written by layers that select; unused where none does.
        ids: [L, T, K] i32 for this device's layers: experts chosen, for the host.
        hidden: [T, D] f32, what the multi-token layer goes on from; None on a device without it.
    """

    num_rows: int
    max_count: int
    is_sparse: bool
    is_given: bool
    positions: View
    counts: View
    cos: View
    sin: View
    caches: View
    selected: View
    num_selected: View
    ids: View
    hidden: View | None = None


@dataclass(frozen=True)
class Place:
    """Where launches go and where they may put what lives within a layer."""

    config: ModelConfig
    launcher: Launcher
    scratch: Arena

    def take(self, *shape: int, dtype: str = "f32") -> View:
        return self.scratch.take(shape, dtype)


def decoder_layer(
    x: View,
    weights: LayerWeights,
    place: Place,
    inputs: PassInputs,
    offsets: dict[str, int],
    experts: LayerExperts | None,
    ids: View | None,
    upcoming: LayerWeights | None = None,
) -> None:
    """Add a layer's contributions to the residual stream, in place.

    Args:
        x: [T, D] f32.
        weights: as `to_device` made them.
        offsets: bytes from a sequence's cache to each stream of this layer.
        experts: of a sparse layer.
        ids: [T, K] i32, where a sparse layer puts its choice.
        upcoming: the next layer, a sparse one, if its choice is to be guessed: by its router, on this layer's state.
    """
    marked = place.scratch.used_bytes
    if isinstance(weights.attention, HeadAttentionWeights):
        _head_attention(x, weights.input_norm, weights.attention, place, inputs, offsets)
    else:
        _latent_attention(x, weights.input_norm, weights.attention, place, inputs, offsets)
    place.scratch.cut(marked)
    if isinstance(weights.mlp, MlpWeights):
        hidden = _mlp_hidden(_normed(x, weights.post_attention_norm, place), weights.mlp, place)
        project(place.launcher, hidden, weights.mlp.down, x, add=x)
    else:
        assert experts is not None and ids is not None
        _add_moe(x, weights, place, experts, ids, None if upcoming is None else _guess(x, ids, upcoming, place))
    place.scratch.cut(marked)


def draft_input(x: View, hidden: View, weights: MtpWeights, place: Place) -> None:
    """What the multi-token layer starts from, in the place of the embeddings: see `glm_gpu.model.mtp`.

    Args:
        x: [T, D] f32, the next tokens' embeddings; overwritten.
        hidden: [T, D] f32.
    """
    marked, (num_rows, width), eps = place.scratch.used_bytes, x.shape, place.config.rms_norm_eps
    both = place.take(num_rows, 2 * width, dtype=HALF)
    rms_norm(place.launcher, x, weights.embedding_norm, eps, split=both)
    rms_norm(place.launcher, hidden, weights.hidden_norm, eps, split=both, begin=width)
    project(place.launcher, both, weights.projection, x)
    place.scratch.cut(marked)


def _latent_attention(
    x: View, norm: View, weights: LatentAttentionWeights, place: Place, inputs: PassInputs, offsets: dict[str, int]
) -> None:
    config, launcher = place.config, place.launcher
    num_rows, num_heads, rank = inputs.num_rows, config.num_attention_heads, config.kv_lora_rank
    nope, rope_width, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    h = place.take(num_rows, config.hidden_size)
    split = place.take(num_rows, config.hidden_size, dtype=HALF)
    rms_norm(launcher, x, norm, config.rms_norm_eps, out=h, split=split)

    q_a, kv = place.take(num_rows, config.q_lora_rank), place.take(num_rows, rank + rope_width)
    project_both(launcher, split, weights.q_a, q_a, weights.kv_a, kv)
    q_latent = place.take(num_rows, config.q_lora_rank, dtype=HALF)
    rms_norm(launcher, q_a, weights.q_a_norm, LATENT_NORM_EPS, split=q_latent)
    q = place.take(num_rows, num_heads, nope + rope_width)
    project(launcher, q_latent, weights.q_b, reshaped(q, num_rows, -1))
    append_latent(
        launcher,
        kv,
        weights.kv_a_norm,
        LATENT_NORM_EPS,
        inputs.cos,
        inputs.sin,
        inputs.caches,
        offsets["latent"],
        inputs.positions,
        HALF,
    )
    if weights.indexer is not None and not inputs.is_given:
        _select(h, split, q_latent, weights.indexer, place, inputs, offsets["index_key"])

    queries = place.take(num_rows, num_heads, rank + rope_width, dtype=HALF)
    absorb_query(launcher, q, weights.kv_b, nope, value, inputs.cos, inputs.sin, queries)
    mixed = place.take(num_rows, num_heads, rank, dtype=HALF)
    scale = (nope + rope_width) ** -0.5
    counts = inputs.num_selected if inputs.is_sparse else inputs.counts
    max_count = min(inputs.max_count, config.index_topk) if inputs.is_sparse else inputs.max_count
    attend_latent(
        launcher,
        queries,
        inputs.caches,
        offsets["latent"],
        HALF,
        inputs.selected if inputs.is_sparse else None,
        counts,
        scale,
        _parts(place, num_rows, num_heads, max_count, rank),
        mixed,
    )
    heads = place.take(num_rows, num_heads * value, dtype=HALF)
    expand_value(launcher, mixed, weights.kv_b, nope, heads)
    project(launcher, heads, weights.output, x, add=x)


def _select(
    h: View,
    split: View,
    q_latent: View,
    weights: IndexerWeights,
    place: Place,
    inputs: PassInputs,
    offset: int,
) -> None:
    """Cache index keys, and where positions are selected choose them for every row; see `glm_gpu.model.indexer`."""
    config, launcher = place.config, place.launcher
    num_rows, num_heads, width = inputs.num_rows, config.index_n_heads, config.index_head_dim
    is_interleaved = config.indexer_rope_interleave
    keys = place.take(num_rows, width)
    project(launcher, split, weights.key, keys)
    append_index_key(
        launcher,
        keys,
        weights.key_norm,
        weights.key_norm_bias,
        INDEX_NORM_EPS,
        inputs.cos,
        inputs.sin,
        is_interleaved,
        inputs.caches,
        offset,
        inputs.positions,
        HALF,
    )
    if not inputs.is_sparse:
        return
    q = place.take(num_rows, num_heads, width)
    project(launcher, q_latent, weights.query, reshaped(q, num_rows, -1))
    queries = place.take(num_rows, num_heads, width, dtype=HALF)
    rope_width = config.qk_rope_head_dim
    rope(launcher, q, 0, inputs.cos, inputs.sin, is_interleaved, queries, 0, num_copied=width - rope_width)
    head_weights = place.take(num_rows, num_heads)
    parts = place.take(num_parts(config.hidden_size), num_rows, num_heads)
    project_f32(launcher, h, weights.head_weights.data, parts, head_weights)
    scores = place.take(num_rows, inputs.max_count)
    index_scores(
        launcher,
        queries,
        head_weights,
        inputs.caches,
        offset,
        HALF,
        inputs.counts,
        width**-0.5,
        num_heads**-0.5,
        scores,
    )
    select_top(launcher, scores, inputs.counts, inputs.selected, inputs.num_selected)


def _head_attention(
    x: View, norm: View, weights: HeadAttentionWeights, place: Place, inputs: PassInputs, offsets: dict[str, int]
) -> None:
    config, launcher = place.config, place.launcher
    num_rows, num_heads, num_kv_heads = inputs.num_rows, config.num_attention_heads, config.num_key_value_heads
    width, eps, clip = config.head_dim, config.rms_norm_eps, config.clip_qkv or 0.0
    split = _normed(x, norm, place)
    query = place.take(num_rows, num_heads, width, dtype=HALF)
    key = place.take(num_rows, num_kv_heads, width)
    for heads, projection, head_norm, rotated in (
        (num_heads, weights.query, weights.query_norm, query),
        (num_kv_heads, weights.key, weights.key_norm, key),
    ):
        projected, normed = place.take(num_rows, heads * width), place.take(num_rows, heads, width)
        project(launcher, split, projection, projected)
        rms_norm(launcher, projected, head_norm, eps, out=reshaped(normed, num_rows, -1))
        rope(launcher, normed, 0, inputs.cos, inputs.sin, False, rotated, 0, clip=clip)
    value = place.take(num_rows, num_kv_heads * width)
    project(launcher, split, weights.value, value)
    caches, positions = inputs.caches, inputs.positions
    append(launcher, reshaped(key, num_rows, -1), caches, offsets["key"], positions, HALF)
    append(launcher, value, caches, offsets["value"], positions, HALF, clip=clip)
    mixed = place.take(num_rows, num_heads, width, dtype=HALF)
    attend_heads(
        launcher,
        query,
        caches,
        offsets["key"],
        offsets["value"],
        num_kv_heads,
        HALF,
        inputs.counts,
        width**-0.5,
        _parts(place, num_rows, num_heads, inputs.max_count, width),
        mixed,
    )
    project(launcher, reshaped(mixed, num_rows, -1), weights.output, x, add=x)


def _guess(x: View, ids: View, upcoming: LayerWeights, place: Place) -> View:
    """What a later layer's router would choose for a residual stream: [T, K] i32."""
    assert isinstance(upcoming.mlp, MoeWeights)
    h, guess = place.take(*x.shape), place.take(*ids.shape, dtype="i32")
    rms_norm(place.launcher, x, upcoming.post_attention_norm, place.config.rms_norm_eps, out=h)
    _route(h, upcoming.mlp, place, guess, place.take(*ids.shape))
    return guess


def _route(h: View, weights: MoeWeights, place: Place, ids: View, expert_weights: View) -> None:
    config = place.config
    route(
        place.launcher,
        h,
        weights.gate,
        weights.bias,
        config.n_group,
        config.topk_group,
        config.norm_topk_prob,
        config.routed_scaling_factor,
        place.take(num_parts(config.hidden_size), h.shape[0], config.n_routed_experts),
        ids,
        expert_weights,
    )


def _add_moe(x: View, layer: LayerWeights, place: Place, experts: LayerExperts, ids: View, guess: View | None) -> None:
    config, launcher, layout, weights = place.config, place.launcher, experts.layout, layer.mlp
    num_rows, num_choices = ids.shape
    num_experts, num_pairs = config.n_routed_experts, num_rows * num_choices
    h = place.take(num_rows, config.hidden_size)
    split = place.take(num_rows, config.hidden_size, dtype=HALF)
    rms_norm(launcher, x, layer.post_attention_norm, config.rms_norm_eps, out=h, split=split)
    expert_weights = place.take(num_rows, num_choices)
    _route(h, weights, place, ids, expert_weights)
    experts.chosen(ids, guess)
    tile_rows = rows_per_tile(num_rows, num_choices, num_experts)
    num_tiles = max_tiles(num_rows, num_choices, num_experts, tile_rows)
    tile_experts, pairs = place.take(num_tiles, dtype="i32"), place.take(num_tiles, tile_rows, dtype="i32")
    plan_tiles(launcher, ids, num_experts, place.take(2, num_pairs, dtype="i32"), tile_experts, pairs)
    hidden = place.take(num_pairs, layout.width, dtype=HALF)
    outputs = place.take(num_pairs, layout.hidden)

    def compute(table: View) -> None:
        expert_hidden(launcher, split, num_choices, table, layout, tile_experts, pairs, hidden)
        expert_output(launcher, hidden, table, layout, tile_experts, pairs, outputs)

    experts.compute_resident(compute)
    shared = None if weights.shared is None else _mlp_hidden(split, weights.shared, place)
    experts.compute_missing(compute)
    if shared is not None and num_rows <= BLOCK_M:
        project_onto(launcher, shared, weights.shared.down, outputs, expert_weights, x)
        return
    if shared is not None:
        project(launcher, shared, weights.shared.down, x, add=x)
    combine(launcher, outputs, expert_weights, x, x)


def _mlp_hidden(split: View, weights: MlpWeights, place: Place) -> View:
    hidden = place.take(split.shape[0], weights.gate.shape[0], dtype=HALF)
    mlp_hidden(place.launcher, split, weights.gate, weights.up, hidden)
    return hidden


def _normed(x: View, norm: Array, place: Place) -> View:
    split = place.take(*x.shape, dtype=HALF)
    rms_norm(place.launcher, x, norm, place.config.rms_norm_eps, split=split)
    return split


def _parts(place: Place, num_rows: int, num_heads: int, max_count: int, width: int) -> View:
    """The workspace of attention, for as many rows at a time as MAX_PARTS_BYTES allow."""
    one = parts_shape(1, num_heads, max_count, width)
    return place.take(min(num_rows, max(1, MAX_PARTS_BYTES // (4 * num_items(one)))), *one[1:])


def reshaped(view: View, *shape: int) -> View:
    """The same items in another shape; the last size may be -1 for the rest."""
    count, known = num_items(view.shape), num_items(shape[:-1])
    last = count // known if shape[-1] < 0 else shape[-1]
    assert known * last == count, (view.shape, shape)
    return replace(view, shape=(*shape[:-1], last))


def rows_of(view: View, start: int, stop: int) -> View:
    """Rows start..stop-1 of the first axis."""
    row_bytes = view.nbytes // view.shape[0] if view.shape[0] else 0
    return View(view.ptr + start * row_bytes, (stop - start, *view.shape[1:]), view.dtype)
