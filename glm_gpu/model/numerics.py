"""Choices of arithmetic that hold for a whole model; the defaults keep every row's bits the same in every pass."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# transformers builds the latent norms with its class default, whatever rms_norm_eps says; vLLM and SGLang use
# rms_norm_eps. On the reference fixtures the two differ by 6e-5 in the logits.
LATENT_NORM_EPS = 1e-6
# The indexer's LayerNorm never follows rms_norm_eps.
INDEX_NORM_EPS = 1e-6

# Sees what a pass computes: (quantity, layer, array). Used by tests and traces; it must not keep or change the arrays.
Probe = Callable[[str, int, np.ndarray], None]


@dataclass(frozen=True)
class Numerics:
    """How products are formed.

    Args:
        activations: "int16", "int8" or "f32": what activations are rounded to before they meet packed weights.
        explicit_prefill: attend over expanded keys and values in prefill. Fewer operations per pair of positions, but a
            prompt's rows then differ in their last bits from the same rows decoded.
        always_index: score and select even while every position would be selected; changes no result.
    """

    activations: str = "int16"
    explicit_prefill: bool = False
    always_index: bool = False
