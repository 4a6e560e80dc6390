"""New rows of the caches: normed, rotated, and stored at their positions in one kernel each.

A pass may hold rows of many sequences, each with a cache of its own, so a cache is named by address: row t of the pass
is stored at  caches[t] + offset + positions[t] * width * 2  bytes.
"""

import numpy as np

from glm_gpu.kernels.gpu.arrays import Array, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two

_APPEND_LATENT = Kernel("rows", "append_latent_kernel")
_APPEND_INDEX_KEY = Kernel("rows", "append_index_key_kernel", num_warps=1)
_APPEND = Kernel("rows", "append_kernel")
_ROPE = Kernel("rows", "rope_kernel", num_warps=1)


def append_latent(
    launcher: Launcher,
    kv: Array,
    norm_weight: Array,
    eps: float,
    cos: Array,
    sin: Array,
    caches: Array,
    offset: int,
    positions: Array,
    cache_dtype: str,
) -> None:
    """Cache a latent row a token: RMSNorm of the first R columns, interleaved rotation of the last P.

    Args:
        kv: [T, R + P] f32, the kv_a projection.
        norm_weight: [R] f32.
        eps: of the norm.
        cos, sin: [T, P / 2] f32.
        caches: [T] i64, address of each row's cache, a multiple of 16.
        offset: bytes, a multiple of 16, from there to this layer's stream of [S, R + P] rows.
        positions: [T] i32.
        cache_dtype: "bf16" or "f16".
    """
    num_rows, width = kv.shape
    assert offset % 16 == 0, offset
    (rank,) = norm_weight.shape
    rope_width = width - rank
    assert rope_width == 2 * cos.shape[1] and cos.shape == sin.shape, (kv.shape, norm_weight.shape, cos.shape)
    arguments = {
        "kv_ptr": kv,
        "weight_ptr": norm_weight,
        "cos_ptr": cos,
        "sin_ptr": sin,
        "caches_ptr": caches,
        "positions_ptr": positions,
        "offset": np.int64(offset),
        "eps": float(eps),
    }
    constants = {
        "RANK": rank,
        "HALF": rope_width // 2,
        "BLOCK_RANK": power_of_two(rank),
        "BLOCK_HALF": power_of_two(rope_width // 2),
        "CACHE": cache_dtype,
    }
    launcher.launch(_APPEND_LATENT, (num_rows,), arguments, constants)


def append_index_key(
    launcher: Launcher,
    keys: Array,
    norm_weight: Array,
    norm_bias: Array,
    eps: float,
    cos: Array,
    sin: Array,
    is_interleaved: bool,
    caches: Array,
    offset: int,
    positions: Array,
    cache_dtype: str,
) -> None:
    """Cache an index key a token: LayerNorm over all M columns, then rotation of the first P.

    Args:
        keys: [T, M] f32, the indexer's key projection.
        norm_weight, norm_bias: [M] f32.
        cos, sin: [T, P / 2] f32.
        is_interleaved: rotate pairs (2j, 2j + 1), otherwise (j, j + P / 2).
        caches, offset, positions, cache_dtype: as in append_latent, rows of M.
    """
    num_rows, width = keys.shape
    assert offset % 16 == 0, offset
    arguments = {
        "keys_ptr": keys,
        "weight_ptr": norm_weight,
        "bias_ptr": norm_bias,
        "cos_ptr": cos,
        "sin_ptr": sin,
        "caches_ptr": caches,
        "positions_ptr": positions,
        "offset": np.int64(offset),
        "eps": float(eps),
    }
    constants = {
        "WIDTH": width,
        "HALF": cos.shape[1],
        "BLOCK": power_of_two(width),
        "IS_INTERLEAVED": is_interleaved,
        "CACHE": cache_dtype,
    }
    launcher.launch(_APPEND_INDEX_KEY, (num_rows,), arguments, constants)


def append(
    launcher: Launcher, rows: Array, caches: Array, offset: int, positions: Array, cache_dtype: str, clip: float = 0.0
) -> None:
    """Cache rows as they are, rounded to the cache's type: OLMoE's values.

    Args:
        rows: [T, W] f32.
        caches, offset, positions, cache_dtype: as in append_latent, rows of W.
        clip: values are limited to [-clip, clip] before; 0 for no limit.
    """
    num_rows, width = rows.shape
    assert offset % 16 == 0, offset
    arguments = {
        "rows_ptr": rows,
        "caches_ptr": caches,
        "positions_ptr": positions,
        "offset": np.int64(offset),
        "clip": float(clip),
    }
    constants = {"WIDTH": width, "BLOCK": power_of_two(width), "HAS_CLIP": clip != 0.0, "CACHE": cache_dtype}
    launcher.launch(_APPEND, (num_rows,), arguments, constants)


def rope(
    launcher: Launcher,
    x: Array,
    x_begin: int,
    cos: Array,
    sin: Array,
    is_interleaved: bool,
    out: Array,
    out_begin: int,
    num_copied: int = 0,
    clip: float = 0.0,
) -> None:
    """Rotate P columns of every head of every row, and copy the columns right behind them unrotated.

    Specification: glm_gpu.kernels.rope; members of a pair stay where they are.

    Args:
        x: [T, H, X] f32.
        x_begin: first of the P columns in x.
        cos, sin: [T, P / 2] f32.
        is_interleaved: rotate pairs (2j, 2j + 1), otherwise (j, j + P / 2).
        out: [T, H, Y] f32 or 16-bit; only P + num_copied columns from out_begin on are written.
        out_begin: where the rotated columns go.
        num_copied: columns copied as they are, from x_begin + P to out_begin + P; the index queries' rest.
        clip: inputs are limited to [-clip, clip] before; 0 for no limit.
    """
    num_rows, num_heads, x_width = x.shape
    out_width = out.shape[2]
    rope_width = 2 * cos.shape[1]
    assert out.shape[:2] == x.shape[:2] and cos.shape == sin.shape == (num_rows, rope_width // 2), (x.shape, cos.shape)
    assert x_begin + rope_width + num_copied <= x_width and out_begin + rope_width + num_copied <= out_width
    arguments = {"x_ptr": x, "cos_ptr": cos, "sin_ptr": sin, "out_ptr": out, "clip": float(clip)}
    constants = {
        "NUM_HEADS": num_heads,
        "X_WIDTH": x_width,
        "X_BEGIN": x_begin,
        "OUT_WIDTH": out_width,
        "OUT_BEGIN": out_begin,
        "HALF": rope_width // 2,
        "NUM_COPIED": num_copied,
        "BLOCK": power_of_two(rope_width + num_copied),
        "IS_INTERLEAVED": is_interleaved,
        "HAS_CLIP": clip != 0.0,
    }
    launcher.launch(_ROPE, (num_rows, num_heads), arguments, constants)
