"""Products of activations with weights in their stored form."""

from glm_gpu.kernels.gpu.arrays import Array, DeviceMatrix, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two
from glm_gpu.kernels.gpu.product import (
    BLOCK_M,
    BLOCK_N,
    product_constants,
    product_kernel,
    tile_rows,
    tiles,
    words,
)

# left to itself ptxas takes 80 registers for bf16 weights on sm_120, and spills
_ABSORB = Kernel("projection", "absorb_kernel", max_registers=128)
_EMBED = Kernel("projection", "embed_kernel")


def project(
    launcher: Launcher, x: Array, w: DeviceMatrix, out: Array, add: Array | None = None, is_split: bool = False
) -> None:
    """x @ w.T, plus `add` if there is one: every projection, and the head.

    Specification: glm_gpu.kernels.matmul.matmul with activations "f32", on x as rounded to 16 bits.

    Args:
        x: [T, I] 16-bit, quarter-split.
        w: [O, I], packed or bf16.
        out: [T, O] f32 or 16-bit.
        add: [T, O] f32, added last; may be `out` itself (the residual stream).
        is_split: `out` is 16-bit and written quarter-split; O is a multiple of 4.
    """
    num_rows, width = x.shape
    num_outputs = w.shape[0]
    assert width == w.shape[1] and out.shape == (num_rows, num_outputs), (x.shape, w.shape, out.shape)
    assert add is None or (add.shape == out.shape and add.dtype == "f32"), add
    _project(launcher, x, w, out, add, is_split, num_rows, 1, 0, num_outputs)


def project_onto(launcher: Launcher, x: Array, w: DeviceMatrix, experts: Array, weights: Array, out: Array) -> None:
    """`project` added to the residual stream, and `glm_gpu.kernels.gpu.experts.combine` behind it, to the same bits.

    Args:
        x: [T, I] 16-bit, quarter-split; T is at most BLOCK_M.
        w: [O, I], packed or plain.
        experts: [T * K, O] f32, the outputs of each row's experts.
        weights: [T, K] f32.
        out: [T, O] f32, the stream.
    """
    num_rows, num_outputs = out.shape
    assert num_rows <= BLOCK_M and w.shape == (num_outputs, x.shape[1]) and weights.shape[0] == num_rows, (out, w)
    assert experts.shape == (num_rows * weights.shape[1], num_outputs), (experts.shape, weights.shape)
    _project(launcher, x, w, out, out, False, num_rows, 1, 0, num_outputs, experts, weights)


def project_both(
    launcher: Launcher, x: Array, w: DeviceMatrix, out: Array, other_w: DeviceMatrix, other_out: Array
) -> None:
    """Two plain products of the same activations, to the bits of `project`: one launch if the formats are the same.

    Args:
        x: [T, I] 16-bit, quarter-split.
        w, other_w: [O, I] each, packed or plain.
        out, other_out: [T, O] f32 each.
    """
    if w.format != other_w.format or (w.scales and w.scales.dtype) != (other_w.scales and other_w.scales.dtype):
        project(launcher, x, w, out)
        project(launcher, x, other_w, other_out)
        return
    num_rows, width = x.shape
    assert width == w.shape[1] == other_w.shape[1], (x.shape, w.shape, other_w.shape)
    assert out.shape == (num_rows, w.shape[0]) and other_out.shape == (num_rows, other_w.shape[0])
    block_m = tile_rows(num_rows)
    arguments = {
        "x_ptr": x,
        "w_ptr": words(w),
        "s_ptr": w.scales,
        "out_ptr": out,
        "other_w_ptr": words(other_w),
        "other_s_ptr": other_w.scales,
        "other_out_ptr": other_out,
        "num_rows": num_rows,
    }
    constants = product_constants(w.format, width, block_m) | {"N": w.shape[0], "OTHER_N": other_w.shape[0]}
    num_tiles = tiles(w.shape[0], BLOCK_N) + tiles(other_w.shape[0], BLOCK_N)
    kernel = product_kernel("projection", "project_both_kernel", block_m)
    launcher.launch(kernel, (num_tiles, tiles(num_rows, block_m)), arguments, constants)


def expand_value(launcher: Launcher, o: Array, kv_b: DeviceMatrix, nope_dim: int, out: Array) -> None:
    """Attended latents as value vectors: head h's latent times the value rows of that head.

    Specification: glm_gpu.kernels.absorb.expand_value with activations "f32".

    Args:
        o: [T, H, R] 16-bit, quarter-split within each head.
        kv_b: [H * (N + A), R].
        nope_dim: N.
        out: [T, H * A] 16-bit, quarter-split over all heads together.
    """
    num_rows, num_heads, rank = o.shape
    assert kv_b.shape[1] == rank and kv_b.shape[0] % num_heads == 0, (o.shape, kv_b.shape)
    value_dim = kv_b.shape[0] // num_heads - nope_dim
    assert out.shape == (num_rows, num_heads * value_dim), (out.shape, num_heads, value_dim)
    _project(launcher, o, kv_b, out, None, True, num_rows, num_heads, nope_dim, value_dim)


def _project(
    launcher, x, w, out, add, is_split, num_rows, num_batches, first_row, num_outputs, experts=None, weights=None
):
    assert not is_split or (num_batches * num_outputs) % 4 == 0, (num_batches, num_outputs)
    block_m = tile_rows(num_rows)
    arguments = {
        "x_ptr": x,
        "w_ptr": words(w),
        "s_ptr": w.scales,
        "add_ptr": add,
        "experts_ptr": experts,
        "weights_ptr": weights,
        "out_ptr": out,
        "num_rows": num_rows,
    }
    constants = product_constants(w.format, w.shape[1], block_m) | {
        "N": num_outputs,
        "NUM_BATCHES": num_batches,
        "FIRST_ROW": first_row,
        "ROWS_PER_BATCH": w.shape[0] // num_batches,
        "HAS_ADD": add is not None,
        "NUM_CHOICES": 0 if weights is None else weights.shape[1],
        "IS_SPLIT": is_split,
    }
    grid = tiles(num_outputs, BLOCK_N), tiles(num_rows, block_m), num_batches
    launcher.launch(product_kernel("projection", "project_kernel", block_m), grid, arguments, constants)


def absorb_query(
    launcher: Launcher,
    q: Array,
    kv_b: DeviceMatrix,
    nope_dim: int,
    value_dim: int,
    cos: Array,
    sin: Array,
    out: Array,
) -> None:
    """Queries in latent space: the sum over d of q[t, h, d] * key row d of head h; and their rotated columns behind it.

    Specification: glm_gpu.kernels.absorb.absorb_query, and glm_gpu.kernels.rope.rope_interleaved.

    Args:
        q: [T, H, N + P] f32.
        kv_b: [H * (N + A), R].
        nope_dim, value_dim: N and A.
        cos, sin: [T, P / 2] f32.
        out: [T, H, R + P] 16-bit, plain.
    """
    num_rows, num_heads, q_width = q.shape
    num_weights, rank = kv_b.shape
    assert num_weights == num_heads * (nope_dim + value_dim), (q.shape, kv_b.shape)
    half = cos.shape[1]
    assert q_width == nope_dim + 2 * half and out.shape == (*q.shape[:2], rank + 2 * half), (q.shape, out.shape)
    assert cos.shape == sin.shape == (num_rows, half), (cos.shape, num_rows)
    arguments = {
        "q_ptr": q,
        "w_ptr": words(kv_b),
        "s_ptr": kv_b.scales,
        "cos_ptr": cos,
        "sin_ptr": sin,
        "out_ptr": out,
        "num_rows": num_rows,
    }
    constants = {
        "BITS": kv_b.format.bits,
        "GROUP": kv_b.format.group or 0,
        "RANK": rank,
        "NUM_HEADS": num_heads,
        "NOPE": nope_dim,
        "ROWS_PER_HEAD": nope_dim + value_dim,
        "Q_WIDTH": q_width,
        "OUT_WIDTH": out.shape[2],
        "HALF": half,
        "BLOCK_HALF": power_of_two(half),
        "BLOCK_M": BLOCK_M,
        "BLOCK_D": 32,
    }
    launcher.launch(_ABSORB, (tiles(rank, 64) + 1, tiles(num_rows), num_heads), arguments, constants)


def embed(launcher: Launcher, token_ids: Array, table: DeviceMatrix, out: Array) -> None:
    """The tokens' embeddings: row token_ids[t] of the table, dequantized.

    Specification: glm_gpu.quant.dequantize.

    Args:
        token_ids: [T] i32, each in [0, V).
        table: [V, D], packed or bf16.
        out: [T, D] f32.
    """
    (num_rows,) = token_ids.shape
    width = table.shape[1]
    assert out.shape == (num_rows, width), (out.shape, table.shape)
    arguments = {"ids_ptr": token_ids, "w_ptr": words(table), "s_ptr": table.scales, "out_ptr": out}
    constants = {"BITS": table.format.bits, "GROUP": table.format.group or 0, "WIDTH": width, "BLOCK": 256}
    launcher.launch(_EMBED, (num_rows, tiles(width, 4 * 256)), arguments, constants)
