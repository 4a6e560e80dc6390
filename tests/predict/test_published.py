"""The cost model reproduces what others published of their machines, and says which it does not."""

import runpy
from pathlib import Path

import pytest

PUBLISHED = runpy.run_path(str(Path(__file__).parents[2] / "bench/published.py"))
DATA = PUBLISHED["load"]()
WITHIN = PUBLISHED["WITHIN"]


def rows(kind: str) -> list[dict]:
    found = {"calibration": [], "misses": [], "counted": []}
    for row in DATA["rows"]:
        found["calibration" if row.get("calibration") else "misses" if "misses" in row else "counted"].append(row)
    return found[kind]


def off(row: dict) -> float:
    return PUBLISHED["predicted"](row, DATA)[0] / row["tok_s"] - 1


def test_enough_are_counted_of_several_engines_and_all_name_a_source():
    assert len(rows("counted")) >= 4 and {row["engine"] for row in rows("counted")} == set(DATA["engines"])
    assert all(row["source"] for row in DATA["rows"])


@pytest.mark.parametrize("row", rows("counted"), ids=lambda row: row["name"])
def test_published_speeds_are_reproduced(row):
    assert abs(off(row)) <= WITHIN


@pytest.mark.parametrize("row", rows("misses"), ids=lambda row: row["name"])
def test_rows_said_to_miss_do(row):
    assert abs(off(row)) > WITHIN


def test_an_engine_is_calibrated_by_no_more_than_one_row():
    assert [row["engine"] for row in rows("calibration")] == ["KTransformers"]
    assert abs(off(rows("calibration")[0])) < 0.02


def test_simulated_hit_rates_are_near_the_published_ones():
    for row in rows("counted"):
        if "published_hit_rate" in row:
            assert PUBLISHED["predicted"](row, DATA)[1] == pytest.approx(row["published_hit_rate"], abs=0.15), row[
                "name"
            ]
