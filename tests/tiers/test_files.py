"""Experts into slabs, whatever the file system does."""

import errno
import mmap
import os
import shutil

import numpy as np
import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.errors import CheckpointError
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.expert import read_expert
from glm_gpu.tiers.files import ExpertFiles


def _slot(files: ExpertFiles, layer: int) -> np.ndarray:
    slot = np.frombuffer(mmap.mmap(-1, files.layout(layer).aligned_nbytes), np.uint8)
    slot[:] = 0xA5
    return slot


def _read(files: ExpertFiles, layer: int = 1, expert: int = 3) -> np.ndarray:
    slot = _slot(files, layer)
    files.read(layer, expert, slot)
    return slot[: files.layout(layer).nbytes]


@pytest.fixture
def expected(demo_checkpoint, open_files) -> np.ndarray:
    """Expert 3 of layer 1, tensor by tensor."""
    layout = open_files().layout(1)
    slab = np.empty(layout.nbytes, np.uint8)
    read_expert(demo_checkpoint, layout, 1, 3, slab, "rtn")
    return slab


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_every_expert_of_the_demo_is_one_run_and_one_read(demo_checkpoint, open_files, expected, mode):
    """C31: explicit reads of whole experts, no page faults. `glm-gpu bench tiers` holds their rate against the disk."""
    reads = []

    def preadv(descriptor, buffers, offset):
        reads.append(offset)
        return os.preadv(descriptor, buffers, offset)

    files = open_files(mode=mode, preadv=preadv)
    assert all(files.run(layer, expert) for layer in files.layers for expert in range(files.num_experts))
    assert np.array_equal(_read(files), expected)
    assert len(reads) == 1
    files.close()


def test_short_reads_are_continued(open_files, expected):
    def preadv(descriptor, buffers, offset):
        return os.preadv(descriptor, [buffers[0][: min(len(buffers[0]), 1000)]], offset)

    files = open_files(mode="buffered", preadv=preadv)
    assert np.array_equal(_read(files), expected)
    files.close()


def test_a_short_direct_read_is_finished_through_the_page_cache(open_files, expected):
    def preadv(descriptor, buffers, offset):
        whole = os.preadv(descriptor, buffers, offset)
        return min(whole, 5000)

    files = open_files(mode="direct", preadv=preadv)
    assert np.array_equal(_read(files), expected)
    files.close()


def test_refused_direct_reads_fall_back_for_that_file_and_say_so_once(open_files, expected, caplog):
    """C30: O_DIRECT opens, and reading gives EINVAL."""
    refused = []

    def preadv(descriptor, buffers, offset):
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(descriptor, buffers, offset)

    files = open_files(mode="direct", preadv=preadv)
    assert np.array_equal(_read(files), expected)
    assert np.array_equal(_read(files), expected)
    assert len(files.buffered_shards) == 1 and len(refused) == 1
    assert caplog.text.count("direct reads are refused") == 1
    files.close()


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_read_error_names_shard_layer_and_expert(open_files, mode):
    def preadv(descriptor, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = open_files(mode=mode, preadv=preadv)
    with pytest.raises(CheckpointError, match=r"model.*safetensors: expert 3 of layer 1 cannot be read \(Input/output"):
        _read(files)
    files.close()


def test_a_file_that_shrank_while_open_is_named(tmp_path):
    folder = tmp_path / "модель 模型 é"  # C23
    shutil.copytree(DEMO_MODEL, folder)
    with Checkpoint.open(folder) as checkpoint:
        files = ExpertFiles(checkpoint, Recipe.default(), list(checkpoint.config.sparse_layers))
        run = files.run(1, 3)
        os.truncate(run.shard, run.begin + 100)
        with pytest.raises(CheckpointError, match=r"ends .* bytes early"):
            _read(files)
        files.close()


def test_experts_that_lie_in_pieces_or_are_not_quantized_are_read_all_the_same(oracle_dir):
    with Checkpoint.open(oracle_dir / "tiny_glm_fp8") as checkpoint:
        layer = checkpoint.config.sparse_layers[0]
        files = ExpertFiles(checkpoint, Recipe.default(), [layer])
        assert files.run(layer, 5) is None
        slab = np.empty(files.layout(layer).nbytes, np.uint8)
        read_expert(checkpoint, files.layout(layer), layer, 5, slab, "search")
        assert np.array_equal(_read(files, layer, 5), slab)
