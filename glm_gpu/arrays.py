"""Questions about plain arrays that several modules ask."""

import numpy as np


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading items two arrays share."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
