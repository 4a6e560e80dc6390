"""`glm-gpu bench`: rows with spread and limits, what may be called the disk's, and parts that fail alone."""

import json

import pytest

from glm_gpu.bench import process, reads, tiers
from glm_gpu.bench import slice as slices
from glm_gpu.bench.measurement import Limit, Part
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.errors import DeviceError
from glm_gpu.kernels import cpu, limits
from glm_gpu.report_bench import part_text
from glm_gpu.tiers.read_bench import ReadRate

needs_extension = pytest.mark.skipif(cpu.active is None, reason="limits are measured by the C kernels")
QUICK = ("--quick", "--json", "--model", DEMO_MODEL)


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch):
    monkeypatch.setattr(limits, "_MEASURE_S", 0.01)


def rows_of(invoke, *words) -> dict:
    code, out, err = invoke("bench", *words)
    assert (code, err) == (0, "") and out.count("\n") == 1
    found = json.loads(out)
    assert found["bench"] == words[0]
    assert found.keys() >= {"machine", "noise", "peak_rss_bytes", "storage_bytes_read", "seconds", "notes"}
    for row in found["rows"]:
        assert 0 <= row["low"] <= row["median"] <= row["high"]
        assert ("share" in row) == ("limit" in row)
        assert "share" not in row or row["share"] == pytest.approx(row["median"] / row["limit"])
    return {row["name"]: row for row in found["rows"]}


@needs_extension
def test_decode_is_held_against_memory(invoke):
    rows = rows_of(invoke, "decode", *QUICK)
    assert [*rows] == ["decode, empty context", "decode at 4084 positions"]
    assert all(sum(row["shares"].values()) == pytest.approx(1.0) for row in rows.values())
    assert all(
        row["limit"] == pytest.approx(row["memory_gb_s"] * 1e9 / row["bytes_per_token"]) for row in rows.values()
    )


@needs_extension
def test_without_a_model_a_slice_is_written_to_the_disk_named_and_removed(invoke, monkeypatch, tmp_path):
    small = json.loads((DEMO_MODEL / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    monkeypatch.setattr(slices, "glm_config", lambda shape: small)
    code, out, _ = invoke("bench", "prefill", "--quick", "--json", "--disk", tmp_path)
    assert code == 0 and json.loads(out)["subject"].startswith("glm-gpu-slice-")
    assert list(tmp_path.iterdir()) == []


@needs_extension
def test_prefill_is_held_against_the_products(invoke):
    (row,) = rows_of(invoke, "prefill", *QUICK).values()
    assert row["limit"] == pytest.approx(row["peak_gmac_s"] * 1e9 / row["products_per_token"])


@needs_extension
def test_tiers_tell_hits_against_the_best_and_bytes_against_the_disk(invoke):
    resident, quarter = rows_of(invoke, "tiers", *QUICK).values()
    assert (resident["hit_rate"], resident["read_bytes_per_token"]) == (1.0, 0.0)
    assert 0 < quarter["hit_rate"] < quarter["best_hit_rate"] < 1
    assert quarter["read_bytes_per_token"] > 0 and 0 < quarter["wait_share"] < 1


@needs_extension
def test_where_the_page_cache_cannot_be_passed_no_tier_is_held_against_the_disk(invoke, monkeypatch):
    def rate(order, mode, depth, seconds):
        if mode == "direct":
            raise OSError(22, "Invalid argument")
        return 9.0

    monkeypatch.setattr(tiers, "read_rate", rate)
    code, out, _ = invoke("bench", "tiers", *QUICK)
    found = json.loads(out)
    assert code == 0 and "share" not in found["rows"][1] and not found["rows"][1]["is_disk"]
    assert any("refused here (Invalid argument): no row tells about the disk" in note for note in found["notes"])


@needs_extension
def test_every_kernel_row_names_its_limit_or_is_a_time(invoke, monkeypatch):
    from glm_gpu.bench import kernels

    monkeypatch.setattr(kernels, "MEMORY_BYTES", 1 << 26)
    rows = rows_of(invoke, "kernels", "--quick", "--json")
    assert {row.get("limit_name") for row in rows.values()} == {
        "memory read", "int16 products", "f32 products and sums", None,
    }  # fmt: skip
    assert all((row["unit"] == "ms") == ("limit" not in row) for row in rows.values())


def test_io_rows_are_those_of_the_reading_bench(invoke):
    rows = rows_of(invoke, "io", *QUICK)
    assert all(row["is_disk"] == name.startswith("disk") for name, row in rows.items())
    assert all(row["samples"] == 3 and row["expert_bytes"] > 0 for row in rows.values())


def test_a_figure_of_the_page_cache_is_never_the_disks(invoke, monkeypatch):
    """C31: cached pages and a file system without direct reads leave no figure of the disk."""
    found = [ReadRate("buffered", 1, (9.0,), 0.9), ReadRate("direct", 1, (), 0.9, refused="Invalid argument")]
    monkeypatch.setattr(reads, "measure_reads", lambda runs, seconds: found)
    rows = rows_of(invoke, "io", *QUICK)
    assert [*rows] == ["page cache: buffered, 1 in flight"]
    assert "share" not in rows["page cache: buffered, 1 in flight"]
    text = invoke("bench", "io", "--model", DEMO_MODEL)[1]
    assert "refused by the file system: Invalid argument" in text and "no row is the disk's" in text


def test_the_text_has_median_spread_share_and_noise_floor():
    part = Part("decode", "a slice")
    part.add("decode", [9.0, 10.0, 12.0], "tok/s", Limit(20.0, "memory read"))
    lines = part_text(part.document()).splitlines()
    assert lines[0] == "decode   a slice"
    assert " ".join(lines[1].split()) == "decode 10.0 tok/s (9.00 to 12.0) 50% of 20.0, memory read"
    assert lines[2].startswith("noise floor 30.0%")


def test_all_parts_run_one_after_the_other_and_one_that_fails_spoils_none(invoke, monkeypatch):
    asked = []

    def document(*words):
        asked.append(words)
        if "prefill" in words:
            raise DeviceError("no C extension")
        part = Part(words[1], "a slice")
        part.add("row", [1.0], "tok/s")
        return part.document()

    monkeypatch.setattr(process, "own_document", document)
    code, out, _ = invoke("bench", "--quick", "--threads", 2, "--model", DEMO_MODEL, "--json")
    parts = json.loads(out)["parts"]
    assert code == 1 and json.loads(out)["glm_5_2"] is None
    assert [part["bench"] for part in parts] == ["io", "kernels", "decode", "prefill", "tiers", "serve"]
    assert parts[3] == {"bench": "prefill", "error": "no C extension"}
    assert asked[2] == ("bench", "decode", "--json", "--model", str(DEMO_MODEL), "--threads", "2", "--quick")
    code, out, _ = invoke("bench", "--model", DEMO_MODEL)
    assert code == 1 and "prefill   no C extension" in out and "tiers   a slice" in out


def test_the_sum_is_a_prediction_for_all_of_glm_bound_by_what_was_measured(invoke, monkeypatch):
    def document(*words):
        part = Part(words[1], "a slice")
        if words[1] == "io":
            part.add("disk", [0.5], "GB/s", is_disk=True, depth=1, expert_bytes=21_000_000)
        if words[1] == "kernels":
            part.add("matmul", [20.0], "GB/s", Limit(30.0, "memory read"))
            part.add("matmul, many tokens", [100.0], "GMAC/s", Limit(150.0, "int16 products"))
        return part.document()

    monkeypatch.setattr(process, "own_document", document)
    found = json.loads(invoke("bench", "--model", DEMO_MODEL, "--json")[1])["glm_5_2"]
    assert found["machine"]["disk_gb_s"] == 0.5 and found["machine"]["memory_gb_s"] == 30.0
    assert found["prediction"]["decode"]["bottleneck"] == "disk" and 0 < found["prediction"]["tok_s"] < 1
    code, out, _ = invoke("bench", "--model", DEMO_MODEL)
    assert code == 0 and "GLM-5.2, all of it" in out and "bound by disk" in out


def test_a_part_in_a_process_of_its_own_gives_its_document_or_its_error():
    found = process.own_document("bench", "io", "--json", "--quick", "--model", str(DEMO_MODEL))
    assert found["bench"] == "io" and found["rows"]
    with pytest.raises(DeviceError, match="nowhere"):
        process.own_document("bench", "io", "--json", "--model", "/nowhere")
