"""Oracle models opened in float weights, and their reference arrays."""

from collections.abc import Callable

import numpy as np
import pytest
from small_models import open_model

from glm_gpu.model.transformer import Transformer


@pytest.fixture(scope="session")
def open_oracle(oracle_dir) -> Callable[..., Transformer]:
    """Opens an oracle model by its folder's name."""
    return lambda name, recipe=None, numerics=None: open_model(oracle_dir / name, recipe, numerics)


@pytest.fixture(scope="session")
def tiny_glm(open_oracle) -> Transformer:
    return open_oracle("tiny_glm")


@pytest.fixture(scope="session")
def reference(oracle_dir) -> Callable[[str], dict[str, np.ndarray]]:
    """Loads a reference file: `reference("tiny_glm/reference.npz")`."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(oracle_dir / name) as arrays:
            return dict(arrays)

    return load
