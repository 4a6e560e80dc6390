"""Reductions over logits, so that greedy decoding moves one number a row to the host."""

from glm_gpu.kernels.gpu.arrays import Array, Kernel, Launcher
from glm_gpu.kernels.gpu.norm import power_of_two
from glm_gpu.kernels.gpu.product import tiles

_BEST_OF_BLOCK = Kernel("sampling", "best_of_block_kernel")
_BEST_OF_ROW = Kernel("sampling", "best_of_row_kernel", num_warps=1)

BLOCK = 2048


def num_blocks(vocab_size: int) -> int:
    """Blocks that a row of logits is cut into."""
    return tiles(vocab_size, BLOCK)


def argmax(launcher: Launcher, logits: Array, block_values: Array, block_ids: Array, ids: Array) -> None:
    """Each row's best token, ties to the lowest id; -1 for a row that holds NaN or +inf, or nothing above -inf.

    Specification: glm_gpu.sampling.greedy.

    Args:
        logits: [T, V] f32.
        block_values: [T, num_blocks(V)] f32, a workspace.
        block_ids: [T, num_blocks(V)] i32, a workspace.
        ids: [T] i32.
    """
    num_rows, vocab_size = logits.shape
    blocks = num_blocks(vocab_size)
    assert block_values.shape == block_ids.shape == (num_rows, blocks), (block_values.shape, blocks)
    workspace = {"values_ptr": block_values, "block_ids_ptr": block_ids}
    constants = {"VOCAB": vocab_size, "BLOCK": BLOCK}
    launcher.launch(_BEST_OF_BLOCK, (blocks, num_rows), {"logits_ptr": logits} | workspace, constants)
    constants = {"NUM_BLOCKS": blocks, "BLOCK": power_of_two(blocks)}
    launcher.launch(_BEST_OF_ROW, (num_rows,), workspace | {"ids_ptr": ids}, constants)
