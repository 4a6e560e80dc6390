"""Every device operation at the dimensions of a model, on arrays that are addresses only."""

from dataclasses import dataclass

import numpy as np

from glm_gpu.kernels.gpu import attention, experts, indexer, norm, projection, router, rows, sampling
from glm_gpu.kernels.gpu.arrays import DeviceMatrix, View
from glm_gpu.kernels.gpu.product import BLOCK_M
from glm_gpu.kernels.launch import Recorder
from glm_gpu.quant import Format
from glm_gpu.slab import SlabLayout


@dataclass(frozen=True)
class Dimensions:
    """Sizes by the letters of the style guide; the defaults are GLM-5.2's."""

    D: int = 6144
    H: int = 64
    R: int = 512
    P: int = 64
    N: int = 192
    A: int = 256
    Q: int = 2048
    F: int = 2048
    E: int = 256
    K: int = 8
    J: int = 32
    M: int = 128
    V: int = 154880
    index_topk: int = 2048


def array(dtype: str, *shape: int) -> View:
    return View(4096, shape, dtype)


def matrix(format: str, num_rows: int, num_columns: int, scale_dtype: str) -> DeviceMatrix:
    parsed, shape = Format.parse(format), (num_rows, num_columns)
    if not parsed.is_packed:
        return DeviceMatrix(parsed, shape, array(format, *shape))
    data = array("u8", num_rows, parsed.row_bytes(num_columns))
    return DeviceMatrix(parsed, shape, data, array(scale_dtype, num_rows, parsed.num_groups(num_columns)))


def record_products(launcher: Recorder, T: int, format: str, dtype: str, scale_dtype: str, d: Dimensions) -> None:
    """Kernels whose time is that of reading weights: projections, experts, MLP."""

    def weight(num_rows, num_columns):
        return matrix(format, num_rows, num_columns, scale_dtype)

    h, x, pairs = array(dtype, T, d.D), array("f32", T, d.D), T * d.K
    projection.project(launcher, h, weight(d.Q, d.D), array("f32", T, d.Q))
    q_a, kv = array("f32", T, d.Q), array("f32", T, d.R + d.P)
    projection.project_both(launcher, h, weight(d.Q, d.D), q_a, weight(d.R + d.P, d.D), kv)
    if T <= BLOCK_M:
        experts_out = array("f32", pairs, d.D), array("f32", T, d.K)
        projection.project_onto(launcher, array(dtype, T, d.F), weight(d.D, d.F), *experts_out, x)
    projection.project(launcher, array(dtype, T, d.H * d.A), weight(d.D, d.H * d.A), x, x)
    kv_b = weight(d.H * (d.N + d.A), d.R)
    projection.expand_value(launcher, array(dtype, T, d.H, d.R), kv_b, d.N, array(dtype, T, d.H * d.A))
    layout = SlabLayout(Format.parse(format), d.D, d.F, np.float16 if scale_dtype == "f16" else np.float32)
    tile_rows = experts.rows_per_tile(T, d.K, d.E)
    num_tiles = experts.max_tiles(T, d.K, d.E, tile_rows)
    plan = array("i64", d.E), layout, array("i32", num_tiles), array("i32", num_tiles, tile_rows)
    experts.expert_hidden(launcher, h, d.K, *plan, array(dtype, pairs, d.F))
    experts.expert_output(launcher, array(dtype, pairs, d.F), *plan, array("f32", pairs, d.D))
    experts.mlp_hidden(launcher, h, weight(d.F, d.D), weight(d.F, d.D), array(dtype, T, d.F))


def record_others(launcher: Recorder, T: int, format: str, dtype: str, scale_dtype: str, d: Dimensions) -> None:
    """Everything else of a step."""
    x, h, counts, caches = array("f32", T, d.D), array(dtype, T, d.D), array("i32", T), array("i64", T)
    where = caches, 0
    for each in ("int8", format):
        projection.embed(launcher, counts, matrix(each, d.V, d.D, scale_dtype), x)
    norm.rms_norm(launcher, x, array("f32", d.D), 1e-5, x, h)
    norm.rms_norm(launcher, x, None, 1e-5, split=h)
    cos = array("f32", T, d.P // 2)
    latent = array("f32", T, d.R + d.P), array("f32", d.R)
    rows.append_latent(launcher, *latent, 1e-6, cos, cos, *where, counts, dtype)
    key_norm = array("f32", d.M), array("f32", d.M), 1e-6
    rows.append_index_key(launcher, array("f32", T, d.M), *key_norm, cos, cos, True, *where, counts, dtype)
    rows.append(launcher, array("f32", T, d.Q), *where, counts, dtype)
    q, queries = array("f32", T, d.H, d.N + d.P), array(dtype, T, d.H, d.R + d.P)
    index_queries = array("f32", T, d.J, d.M), array(dtype, T, d.J, d.M)
    rows.rope(launcher, index_queries[0], 0, cos, cos, True, index_queries[1], 0, d.M - d.P)
    kv_b = matrix(format, d.H * (d.N + d.A), d.R, scale_dtype)
    projection.absorb_query(launcher, q, kv_b, d.N, d.A, cos, cos, queries)
    scores = array("f32", T, 16384)
    head_weights = array("f32", T, d.J)
    indexer.index_scores(launcher, index_queries[1], head_weights, *where, dtype, counts, 0.1, 0.1, scores)
    chosen = array("i32", T, d.index_topk)
    indexer.select_top(launcher, scores, counts, chosen, counts)
    parts = array("f32", *attention.parts_shape(T, d.H, d.index_topk, d.R))
    for positions in (None, chosen):
        out = parts, array(dtype, T, d.H, d.R)
        attention.attend_latent(launcher, queries, *where, dtype, positions, counts, 0.1, *out)
    heads = array(dtype, T, 16, 128)
    parts = array("f32", *attention.parts_shape(T, 16, d.index_topk, 128))
    attention.attend_heads(launcher, heads, caches, 0, 0, 16, dtype, counts, 0.1, parts, heads)
    logit_parts, chosen = array("f32", router.num_parts(d.D), T, d.E), (array("i32", T, d.K), array("f32", T, d.K))
    gate = array("f32", d.E, d.D)
    router.route(launcher, x, gate, array("f32", d.E), 1, 1, True, 2.5, logit_parts, *chosen)
    router.route(launcher, x, gate, None, 1, 1, False, 1.0, logit_parts, *chosen)
    parts = array("f32", router.num_parts(d.D), T, d.J)
    router.project_f32(launcher, x, array("f32", d.J, d.D), parts, head_weights)
    for num_rows in (T, 64):
        num_tiles = experts.max_tiles(num_rows, d.K, d.E)
        plan = array("i32", num_tiles), array("i32", num_tiles, 16)
        ids, scratch = array("i32", num_rows, d.K), array("i32", 2, num_rows * d.K)
        experts.plan_tiles(launcher, ids, d.E, scratch, *plan)
    experts.combine(launcher, array("f32", T * d.K, d.D), chosen[1], x, x)
    blocks = sampling.num_blocks(d.V)
    best = array("f32", T, blocks), array("i32", T, blocks)
    sampling.argmax(launcher, array("f32", T, d.V), *best, counts)
