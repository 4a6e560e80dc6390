"""Stores over the bundled demo container, whose experts are one run each."""

from collections.abc import Callable, Iterator

import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.store import TieredStore


@pytest.fixture(scope="session")
def demo_checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(DEMO_MODEL) as checkpoint:
        yield checkpoint


@pytest.fixture
def open_files(demo_checkpoint) -> Callable[..., ExpertFiles]:
    """The demo's routed experts as files; keyword arguments as ExpertFiles has them."""
    return lambda **options: ExpertFiles(
        demo_checkpoint, Recipe.default(), list(demo_checkpoint.config.sparse_layers), **options
    )


@pytest.fixture
def open_store(open_files) -> Iterator[Callable[..., TieredStore]]:
    """A store with a number of slots; it is closed after the test."""
    stores = []

    def open_one(num_slots: int, files: ExpertFiles | None = None, **options) -> TieredStore:
        files = files or open_files()
        size = files.layout(files.layers[0]).aligned_nbytes
        heat = Heat(files.layers[-1] + 1, files.num_experts)
        num_pinned = {size: options.pop("num_pinned", 0)}
        stores.append(TieredStore(files, {size: num_slots}, heat, num_pinned, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
