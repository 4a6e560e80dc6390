"""RMSNorm, plain and quarter-split."""

import triton
import triton.language as tl

from glm_gpu.kernels.gpu.source.product import split_columns


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    split_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_SPLIT: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
    SPLIT_BEGIN: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=is_column, other=0.0)
    if HAS_WEIGHT:
        r = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
        x = x * r * tl.load(weight_ptr + column, mask=is_column, other=0.0)
    if HAS_OUT:
        tl.store(out_ptr + row * WIDTH + column, x, mask=is_column)
    if HAS_SPLIT:
        place = split_columns(SPLIT_BEGIN + column, SPLIT_WIDTH)
        tl.store(split_ptr + row * SPLIT_WIDTH + place, x.to(split_ptr.dtype.element_ty), mask=is_column)
