"""simulate and plan's prediction as a user meets them."""

import json

from glm_gpu.options import state_folder
from glm_gpu.predict.cost import PlaceRates, Rates
from glm_gpu.predict.measure import save_rates


def test_simulate_prints_the_prediction_and_its_bottleneck(invoke):
    code, out, _ = invoke("simulate", "--machine", "laptop-16gb", "--prompt", 16, "--tokens", 4)
    assert code == 0 and "tok/s, bound by disk" in out and "first token" in out
    code, out, _ = invoke("simulate", "--machine", "laptop-16gb", "--prompt", 16, "--tokens", 4, "--json")
    found = json.loads(out)
    assert code == 0 and found["prediction"]["decode"]["bottleneck"] == "disk"
    assert found["prediction"]["tok_s"] == 1 / found["prediction"]["decode"]["seconds"]


def test_simulate_without_a_machine_goes_through_the_shipped_ones(invoke):
    code, out, _ = invoke("simulate", "--prompt", 4, "--tokens", 2, "--json")
    assert code == 0 and [found["machine"]["name"] for found in json.loads(out)] == [
        "4x-l40-228gb", "desktop-64gb-24gb-card", "h200-240gb", "laptop-16gb",
    ]  # fmt: skip


def test_simulate_takes_a_file_and_less_ram(invoke, tmp_path):
    path = tmp_path / "box.toml"
    path.write_text('cores = 8\nram = "64GiB"\nmemory_gb_s = 60\ndisk_gb_s = 5\n')
    _, out, _ = invoke("simulate", "--machine", path, "--ram", "20GiB", "--prompt", 8, "--tokens", 2, "--json")
    assert json.loads(out)["ram_bytes"] <= 20 << 30
    path.write_text("cores = 8\n")
    code, out, err = invoke("simulate", "--machine", path)
    assert code == 2 and not out and "ram is missing" in err and err.count("\n") == 1


def test_plan_predicts_from_kept_rates(invoke, oracle_dir):
    code, out, err = invoke("plan", "--model", oracle_dir / "tiny_glm", "--expert-slots", 12)
    assert code == 0 and "tok/s" not in out and "--measure" in err
    save_rates(state_folder(), Rates(PlaceRates(10.0, 50.0, 1e-4), 1.0, 1e-3))
    _, out, _ = invoke("plan", "--model", oracle_dir / "tiny_glm", "--expert-slots", 12)
    assert "decode" in out and "bound by" in out and "first token" in out
    few = ("--expert-slots", 12, "--read", "direct")  # or the page cache would hold the rest
    _, out, _ = invoke("plan", "--model", oracle_dir / "tiny_glm", *few, "--json")
    found = json.loads(out)["prediction"]
    _, out, _ = invoke("plan", "--model", oracle_dir / "tiny_glm", "--json")
    assert json.loads(out)["prediction"]["tok_s"] > found["tok_s"] > 0


def test_plan_measures_where_asked(invoke):
    code, out, _ = invoke("plan", "--measure", "--json")
    assert code == 0 and json.loads(out)["prediction"]["tok_s"] > 0
