import mmap
import os

import pytest

from glm_gpu.tiers.files import Run
from glm_gpu.tiers.read_bench import DEPTHS, ReadRate, cached_share, measure_reads


@pytest.fixture
def runs(tmp_path) -> list[Run]:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    return [Run(path, n * 8 * mmap.PAGESIZE, 8 * mmap.PAGESIZE - 100) for n in range(8)]


def test_pages_just_written_are_seen_in_the_page_cache(runs):
    assert cached_share(runs) == 1.0


def test_every_mode_and_depth_is_a_row_and_a_refusal_says_why(runs):
    rows = measure_reads(runs, 0.01)
    assert [(row.mode, row.depth) for row in rows] == [(mode, d) for mode in ("buffered", "direct") for d in DEPTHS]
    assert all(row.refused or (len(row.rates) == 3 and 0 < min(row.rates) <= row.gb_s) for row in rows)


def test_a_buffered_figure_is_not_called_the_disk_s_while_pages_are_cached():
    assert not ReadRate("buffered", 1, (9.0,), cached_share=0.5).is_disk
    assert ReadRate("buffered", 1, (2.0,), cached_share=0.0).is_disk
    assert ReadRate("direct", 1, (2.0,), cached_share=1.0).is_disk
