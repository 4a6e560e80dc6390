"""The router on a device: f32 from the hidden state to the weights, ties to the lowest id."""

from glm_gpu.kernels.gpu.arrays import Array, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two
from glm_gpu.kernels.gpu.product import tiles

_PROJECT_F32 = Kernel("router", "project_f32_kernel", num_stages=4)
_ADD_PARTS = Kernel("router", "add_parts_kernel")
_CHOOSE = Kernel("router", "choose_kernel", num_warps=1)

BLOCK_E = 16
BLOCK_K = 64


def num_parts(width: int) -> int:
    """Into how many pieces the sum over `width` is cut, by the width alone: each piece is a program of its own."""
    return max(1, min(8, width // 512))


def project_f32(launcher: Launcher, x: Array, w: Array, parts: Array, out: Array | None = None) -> None:
    """x @ w.T with f32 products and sums: router logits, the indexer's head weights.

    The sum over D is made in num_parts(D) pieces, which are added in order.

    Args:
        x: [T, D] f32.
        w: [E, D] f32; D is a multiple of 4.
        parts: [num_parts(D), T, E] f32, overwritten.
        out: [T, E] f32; None leaves the sum over the pieces to `route`.
    """
    num_rows, width = x.shape
    num_outputs = w.shape[0]
    pieces = num_parts(width)
    assert w.shape == (num_outputs, width), (x.shape, w.shape)
    assert parts.shape == (pieces, num_rows, num_outputs), (parts.shape, pieces, num_rows, num_outputs)
    arguments = {"x_ptr": x, "w_ptr": w, "parts_ptr": parts, "num_rows": num_rows}
    piece = tiles(tiles(width, pieces), BLOCK_K) * BLOCK_K
    constants = {
        "WIDTH": width,
        "NUM_OUTPUTS": num_outputs,
        "PIECE": piece,
        "BLOCK_M": 16,
        "BLOCK_E": BLOCK_E,
        "BLOCK_K": BLOCK_K,
    }
    launcher.launch(_PROJECT_F32, (tiles(num_outputs, BLOCK_E), tiles(num_rows), pieces), arguments, constants)
    if out is not None:
        arguments = {"parts_ptr": parts, "out_ptr": out, "num_items": num_rows * num_outputs}
        launcher.launch(
            _ADD_PARTS, (tiles(num_rows * num_outputs, 256),), arguments, {"NUM_PARTS": pieces, "BLOCK": 256}
        )


def route(
    launcher: Launcher,
    x: Array,
    gate: Array,
    bias: Array | None,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scale: float,
    parts: Array,
    ids: Array,
    weights: Array,
) -> None:
    """Choose each token's experts; with a bias by sigmoid (GLM), without by softmax (OLMoE).

    Specification: glm_gpu.kernels.router.route and route_softmax. Whatever the logits, ids are distinct and valid.

    Args:
        x: [T, D] f32, normed hidden states.
        gate: [E, D] f32.
        bias: [E] f32, added for the choice only; None for softmax, which ignores the groups and the scale.
        n_group, topk_group: groups of experts, and how many of them are kept; with n_group > 1 E and n_group are
            powers of two.
        norm_topk_prob: divide the chosen weights by their sum.
        scale: routed_scaling_factor.
        parts: [num_parts(D), T, E] f32, a workspace.
        ids: [T, K] i32, best first.
        weights: [T, K] f32.
    """
    num_rows, experts_per_tok = ids.shape
    num_experts = gate.shape[0]
    assert weights.shape == ids.shape and 1 <= experts_per_tok <= num_experts, (ids.shape, weights.shape)
    is_grouped = bias is not None and n_group > 1
    assert not is_grouped or num_experts & (num_experts - 1) == n_group & (n_group - 1) == 0, (num_experts, n_group)
    project_f32(launcher, x, gate, parts)
    arguments = {
        "parts_ptr": parts,
        "bias_ptr": bias,
        "ids_ptr": ids,
        "weights_ptr": weights,
        "num_rows": num_rows,
        "scale": float(scale),
    }
    constants = {
        "NUM_PARTS": num_parts(x.shape[1]),
        "NUM_EXPERTS": num_experts,
        "BLOCK": power_of_two(num_experts),
        "EXPERTS_PER_TOK": experts_per_tok,
        "BLOCK_CHOICES": power_of_two(experts_per_tok),
        "NUM_GROUPS": n_group if is_grouped else 1,
        "KEPT_GROUPS": topk_group if is_grouped else 1,
        "IS_SIGMOID": bias is not None,
        "IS_NORMED": norm_topk_prob,
    }
    launcher.launch(_CHOOSE, (num_rows,), arguments, constants)
