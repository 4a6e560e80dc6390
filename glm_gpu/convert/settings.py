"""ConvertSettings: what a container shall be like."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from glm_gpu.errors import RequestError
from glm_gpu.recipe import DEFAULT_ROUNDING, Recipe, Rounding

# An interrupted conversion loses one output shard at most: at 0.5 GB/s, eight seconds of work.
DEFAULT_SHARD_BYTES = 4 << 30
MIN_SHARD_BYTES = 64 << 10


@dataclass(frozen=True)
class ConvertSettings:
    """The choices that decide a container's bytes; two equal settings give equal containers.

    Attributes:
        expert_bits: 16, 8, 4 or 2 for routed experts.
        dense_bits: the same for attention, dense and shared MLPs.
        group: columns that share a scale at 4 bits: 64, 128, or 0 for whole rows.
        scales: "f32" or "f16".
        rounding: "rtn" (to nearest) or "search" (the scale of least error); loading does the same by default.
        container: "glm-gpu", or "colibri" for a container without manifest and padding.
        shard_bytes: an output shard is closed before it grows beyond this, if it holds more than one expert or weight.

    Raises:
        RequestError: on creation: a width, group or combination that there is not.
    """

    expert_bits: int = 4
    dense_bits: int = 4
    group: int = 64
    scales: Literal["f32", "f16"] = "f32"
    rounding: Rounding = DEFAULT_ROUNDING
    container: Literal["glm-gpu", "colibri"] = "glm-gpu"
    shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self):
        Recipe.from_bits(self.expert_bits, self.dense_bits, self.group)
        if self.container == "colibri" and self.scales != "f32":
            raise RequestError("--format colibri has f32 scales only; drop --scales or use --format glm-gpu")
        if self.shard_bytes < MIN_SHARD_BYTES:
            raise RequestError(f"--shard-size is {self.shard_bytes} bytes, expected at least {MIN_SHARD_BYTES}")

    @cached_property
    def recipe(self) -> Recipe:
        """The format of each class of weights."""
        return Recipe.from_bits(self.expert_bits, self.dense_bits, self.group).rounded(self.rounding)

    @property
    def scale_dtype(self) -> np.dtype:
        """Type of the scales as arrays have it."""
        return np.dtype(np.float16 if self.scales == "f16" else np.float32)
