"""The tables of README.md and of bench/results/README.md are what the JSON beside them gives, with their commands."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "bench/results/README.md"]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import tables

    return tables


@pytest.mark.parametrize("page", PAGES, ids=["README.md", "results"])
def test_tables_are_those_of_the_results(tables, page):
    text = page.read_text(encoding="utf-8")
    assert tables.updated(text) == text, "run python bench/render.py"


@pytest.mark.parametrize("page", PAGES, ids=["README.md", "results"])
def test_every_table_has_results_and_names_the_commands_that_measured_them(tables, page):
    found = tables.MARK.findall(page.read_text(encoding="utf-8"))
    assert len(found) >= 5
    for _, names, body, _ in found:
        assert body.count("\n|") >= 3, names
        assert re.search(r"\n`(python bench/\w+\.py|glm-gpu bench \w+)[^`]*`", body), names


@pytest.mark.parametrize("page", PAGES, ids=["README.md", "results"])
def test_plots_and_results_that_a_page_names_are_there(page):
    named = re.findall(r"!\[.*?\]\((.*?)\)", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (page.parent / name).exists()] == []


def test_no_result_tells_of_the_folders_it_was_measured_in():
    for path in (ROOT / "bench/results").glob("*.json"):
        assert not re.search(r"/(tmp|home|work|root)/", path.read_text(encoding="utf-8")), path.name


def test_another_result_gives_another_table(tables, tmp_path, monkeypatch):
    row = {"name": "decode", "unit": "tok/s", "median": 7.25, "low": 7.0, "high": 7.5, "samples": 3,
           "limit": 10.0, "limit_name": "memory read", "share": 0.725}  # fmt: skip
    machine = {"cpu": "A processor", "cores": 4, "memory_bytes": 1 << 34, "kernels": "avx2", "date": "2026-01-02"}
    document = {
        "command": "glm-gpu bench decode",
        "rows": [row],
        "noise": 0.031,
        "machine": machine | {"commit": "abc"},
    }
    monkeypatch.setattr(tables.record, "RESULTS", tmp_path)
    text = "before\n<!-- table decode: written by bench/render.py -->\nold\n<!-- end of table -->\nafter\n"
    assert tables.updated(text) == text
    (tmp_path / "decode.json").write_text(json.dumps(document))
    new = tables.updated(text)
    assert "| decode | 7.25 tok/s (7.00 to 7.50) | 72% of 10.0: memory read |" in new
    assert "`glm-gpu bench decode`: A processor, 4 cores, 16.0 GiB, avx2; 2026-01-02, revision abc" in new
    assert "repeats differ by 3.1%" in new and "old" not in new
    assert new.startswith("before\n") and new.endswith("after\n") and tables.updated(new) == new


def test_gaps_that_the_hypervisor_made_are_shown_beside_the_others(tables):
    row = {"name": "longest gap", "unit": "ms", "median": 12.0, "samples": 1, "median_gap_ms": 3.0}
    assert "hypervisor" not in tables.parts([{"rows": [row | {"stolen": 0, "longest_stolen_ms": 0.0}]}])
    shown = tables.parts([{"rows": [row | {"stolen": 4, "longest_stolen_ms": 38.0}]}])
    assert "median gap 3.00 ms; apart from 4 in which the hypervisor had the processors, at most 38.0 ms" in shown
