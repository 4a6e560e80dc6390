"""RMSNorm on a device, and activations in the order that packed weights want."""

from glm_gpu.kernels.gpu.arrays import Array, Kernel, Launcher

_RMS_NORM = Kernel("norm", "rms_norm_kernel", num_warps=8)


def rms_norm(
    launcher: Launcher,
    x: Array,
    weight: Array | None,
    eps: float,
    out: Array | None = None,
    split: Array | None = None,
    begin: int = 0,
) -> None:
    """x / sqrt(mean(x^2) + eps) * weight, plain, quarter-split, or both from one pass over x.

    Specification: glm_gpu.kernels.norm.rms_norm, with f32 sums.

    Args:
        x: [T, D] f32; D is a multiple of 4.
        weight: [D] f32; None leaves x as it is, so that only the type and order change.
        eps: added to the mean of squares.
        out: [T, D] f32, or None.
        split: [T, W] 16-bit, quarter-split, or None; W is D, or more where rows lie side by side. May not overlap x.
        begin: which of the W columns is the first; the D from there on are written.
    """
    num_rows, width = x.shape
    assert width % 4 == 0 and (out is not None or split is not None), (x.shape, out, split)
    split_width = width if split is None else split.shape[1]
    assert split_width % 4 == 0 and 0 <= begin <= split_width - width, (x.shape, split, begin)
    arguments = {"x_ptr": x, "weight_ptr": weight, "out_ptr": out, "split_ptr": split, "eps": float(eps)}
    constants = {
        "WIDTH": width,
        "BLOCK": power_of_two(width),
        "HAS_WEIGHT": weight is not None,
        "HAS_OUT": out is not None,
        "HAS_SPLIT": split is not None,
        "SPLIT_WIDTH": split_width,
        "SPLIT_BEGIN": begin,
    }
    launcher.launch(_RMS_NORM, (num_rows,), arguments, constants)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`; Triton's blocks have such sizes."""
    return 1 << max(0, count - 1).bit_length()
