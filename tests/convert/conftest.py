import pytest
from small_sources import make_awkward_source


@pytest.fixture
def make_source(tmp_path):
    """make_source("fp8" | "bf16", num_shards=3) -> folder of a checkpoint to convert; see `make_awkward_source`."""

    def make(kind: str = "fp8", num_shards: int = 3, seed: int = 0, replace: dict | None = None):
        return make_awkward_source(tmp_path / f"source_{kind}_{seed}", kind, num_shards, seed, replace)

    return make
