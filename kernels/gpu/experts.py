"""Feed-forward networks on a device: all chosen experts of a layer by address, and the dense or shared one.

A layer's experts are named by a table of addresses: [E] i64, where the slab of expert e begins, a multiple of 16 (in
this device's memory, or in pinned host memory that it can read), or 0. Tiles of an expert whose address is 0 are left
out, so a pass may compute what is resident first and the rest, with another table, when it has arrived; `combine`
comes last.
"""

from glm_gpu.kernels.gpu.arrays import Array, DeviceMatrix, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two
from glm_gpu.kernels.gpu.product import (
    BLOCK_M,
    BLOCK_N,
    WIDE_BLOCK_M,
    product_constants,
    product_kernel,
    tile_rows,
    tiles,
    word_bytes,
    words,
)
from glm_gpu.slab import SlabLayout

_PLAN_SMALL = Kernel("plan", "plan_small_kernel")
_RANK = Kernel("plan", "rank_kernel", num_warps=8)
_PLACE = Kernel("plan", "place_kernel", num_warps=8)
_GATHER = Kernel("plan", "gather_kernel")
_COMBINE = Kernel("experts", "combine_kernel")

# Outputs of a tile of gate and up: with 64 rows the registers hold half as many, since gate waits there for up.
_GATED_BLOCK_N = {BLOCK_M: BLOCK_N, WIDE_BLOCK_M: BLOCK_N // 2}

# Up to so many (token, choice) pairs one small kernel makes the whole plan.
_SMALL_PLAN = 128
_BLOCK_PAIRS = 64


def rows_per_tile(num_rows: int, experts_per_tok: int, num_experts: int) -> int:
    """Rows of a tile of one expert that suit a pass: 16, or 64 where experts get many rows on average."""
    return tile_rows(num_rows * experts_per_tok / num_experts)


def max_tiles(num_rows: int, experts_per_tok: int, num_experts: int, block_m: int = BLOCK_M) -> int:
    """Upper bound of the tiles that a pass needs: each holds up to block_m rows of one expert."""
    pairs = num_rows * experts_per_tok
    # U experts with p pairs need at most U + (p - U) / block_m tiles
    distinct = min(pairs, num_experts)
    return distinct + (pairs - distinct) // block_m


def plan_tiles(
    launcher: Launcher, ids: Array, num_experts: int, scratch: Array, tile_experts: Array, pairs: Array
) -> None:
    """Sort (token, choice) pairs by expert into tiles of B rows, pairs of one expert in ascending order.

    Args:
        ids: [T, K] i32, each in [0, E).
        num_experts: E.
        scratch: [2, T * K] i32, a workspace.
        tile_experts: [max_tiles(T, K, E, B)] i32, the tile's expert, or -1 for a tile that is not needed.
        pairs: [max_tiles(T, K, E, B), B] i32, token * K + choice, or -1 where a tile is not full; B is 16 or 64.
    """
    num_rows, experts_per_tok = ids.shape
    num_pairs = num_rows * experts_per_tok
    block_m = pairs.shape[1]
    num_tiles = max_tiles(num_rows, experts_per_tok, num_experts, block_m)
    assert tile_experts.shape == (num_tiles,) and pairs.shape == (num_tiles, block_m), (pairs.shape, num_tiles)
    assert scratch.shape == (2, num_pairs), (scratch.shape, num_pairs)
    outputs = {"tile_experts_ptr": tile_experts, "pairs_ptr": pairs, "num_pairs": num_pairs}
    if num_pairs <= _SMALL_PLAN:
        constants = {"BLOCK": power_of_two(num_pairs), "BLOCK_M": block_m}
        launcher.launch(_PLAN_SMALL, (num_tiles,), {"ids_ptr": ids} | outputs, constants)
        return
    constants = {"BLOCK": _BLOCK_PAIRS, "BLOCK_M": block_m}
    blocks = tiles(num_pairs, _BLOCK_PAIRS)
    inputs = {"ids_ptr": ids, "scratch_ptr": scratch}
    launcher.launch(_RANK, (blocks,), inputs | {"num_pairs": num_pairs}, constants)
    launcher.launch(_PLACE, (blocks,), inputs | {"num_pairs": num_pairs}, constants)
    launcher.launch(_GATHER, (num_tiles,), inputs | outputs, constants)


def expert_hidden(
    launcher: Launcher,
    x: Array,
    experts_per_tok: int,
    table: Array,
    layout: SlabLayout,
    tile_experts: Array,
    pairs: Array,
    hidden: Array,
) -> None:
    """silu(gate x) * up x of every pair whose expert has an address.

    Args:
        x: [T, D] 16-bit, quarter-split.
        experts_per_tok: K; pair p is of token p // K.
        table: [E] i64, addresses of slabs.
        layout: where a slab's matrices lie.
        tile_experts, pairs: from plan_tiles.
        hidden: [T * K, F] 16-bit, quarter-split; rows of pairs left out keep what they hold.
    """
    assert x.shape[1] == layout.hidden and hidden.shape[1] == layout.width, (x.shape, hidden.shape, layout)
    arguments = {
        "x_ptr": x,
        "table_ptr": table,
        "tile_experts_ptr": tile_experts,
        "pairs_ptr": pairs,
        "hidden_ptr": hidden,
    }
    block_m = pairs.shape[1]
    block_n = _GATED_BLOCK_N[block_m]
    constants = product_constants(layout.format, layout.hidden, block_m, block_n) | _slab_constants(
        layout, ("gate", "up")
    )
    constants |= {"N": layout.width, "EXPERTS_PER_TOK": experts_per_tok}
    grid = tiles(layout.width, block_n), tile_experts.shape[0]
    launcher.launch(product_kernel("experts", "expert_hidden_kernel", block_m), grid, arguments, constants)


def expert_output(
    launcher: Launcher,
    hidden: Array,
    table: Array,
    layout: SlabLayout,
    tile_experts: Array,
    pairs: Array,
    outputs: Array,
) -> None:
    """down hidden of every pair whose expert has an address, not yet weighted.

    Args:
        hidden: [T * K, F] 16-bit, quarter-split.
        table, layout, tile_experts, pairs: as in expert_hidden.
        outputs: [T * K, D] f32; rows of pairs left out keep what they hold.
    """
    assert hidden.shape[1] == layout.width and outputs.shape == (hidden.shape[0], layout.hidden), (hidden.shape, layout)
    arguments = {
        "hidden_ptr": hidden,
        "table_ptr": table,
        "tile_experts_ptr": tile_experts,
        "pairs_ptr": pairs,
        "outputs_ptr": outputs,
    }
    block_m = pairs.shape[1]
    constants = product_constants(layout.format, layout.width, block_m) | _slab_constants(layout, ("down",))
    constants |= {"N": layout.hidden}
    grid = tiles(layout.hidden, BLOCK_N), tile_experts.shape[0]
    launcher.launch(product_kernel("experts", "expert_output_kernel", block_m), grid, arguments, constants)


def _slab_constants(layout: SlabLayout, roles: tuple[str, ...]) -> dict[str, int | str]:
    """Byte offsets of matrices and their scales in a slab."""
    item_bytes, scale_bytes = word_bytes(layout.format), layout.scale_dtype.itemsize
    constants = {}
    for role in roles:
        data, scales = layout.parts[role][0], layout.parts.get(f"{role}.qs", (0,))[0]
        assert data % item_bytes == 0 and scales % scale_bytes == 0, f"parts of {layout} lie between two items"
        constants |= {role.upper(): data, f"{role.upper()}_SCALES": scales}
    return constants | {"SCALE": "f16" if scale_bytes == 2 else "f32"}


def mlp_hidden(launcher: Launcher, x: Array, gate: DeviceMatrix, up: DeviceMatrix, hidden: Array) -> None:
    """silu(gate x) * up x of a dense MLP or the shared expert; `project` with its down matrix is the rest.

    Args:
        x: [T, D] 16-bit, quarter-split.
        gate, up: [F, D], the same format.
        hidden: [T, F] 16-bit, quarter-split.
    """
    num_rows = x.shape[0]
    assert gate.shape == up.shape and gate.format == up.format, (gate, up)
    assert x.shape[1] == gate.shape[1] and hidden.shape == (num_rows, gate.shape[0]), (x.shape, hidden.shape)
    arguments = {
        "x_ptr": x,
        "gate_ptr": words(gate),
        "gate_scales_ptr": gate.scales,
        "up_ptr": words(up),
        "up_scales_ptr": up.scales,
        "hidden_ptr": hidden,
        "num_rows": num_rows,
    }
    block_m = tile_rows(num_rows)
    block_n = _GATED_BLOCK_N[block_m]
    constants = product_constants(gate.format, gate.shape[1], block_m, block_n) | {"N": gate.shape[0]}
    grid = tiles(gate.shape[0], block_n), tiles(num_rows, block_m)
    launcher.launch(product_kernel("experts", "mlp_hidden_kernel", block_m), grid, arguments, constants)


def combine(launcher: Launcher, outputs: Array, weights: Array, add: Array, out: Array) -> None:
    """add + (((w0 * e0) + w1 * e1) + ...), choices in order: the residual stream after the experts.

    Args:
        outputs: [T * K, D] f32, from expert_output.
        weights: [T, K] f32.
        add: [T, D] f32; may be `out` itself.
        out: [T, D] f32.
    """
    num_rows, experts_per_tok = weights.shape
    width = out.shape[1]
    assert outputs.shape == (num_rows * experts_per_tok, width) and out.shape == add.shape, (outputs.shape, out.shape)
    arguments = {"outputs_ptr": outputs, "weights_ptr": weights, "add_ptr": add, "out_ptr": out}
    constants = {"WIDTH": width, "EXPERTS_PER_TOK": experts_per_tok, "BLOCK": 512}
    launcher.launch(_COMBINE, (num_rows, tiles(width, 512)), arguments, constants)
