"""The commands with --device: what is printed, and the same text as from the CPU."""

import json

import pytest

from glm_gpu import machine

PROMPT = "And it came to pass"
RUN = ("run", PROMPT, "--max-tokens", "3", "--temperature", "0", "--context", "64")


def test_two_simulated_devices_write_what_the_cpu_writes(invoke):
    code, text, _ = invoke(*RUN, "--device", "cpu")
    assert invoke(*RUN, "--device", "sim:2")[:2] == (code, text) == (0, text)
    assert invoke(*RUN, "--device", "sim:2", "--speculate", "mtp")[:2] == (0, text)


def test_a_conversation_on_two_devices_goes_on_from_its_file(invoke, tmp_path):
    file = tmp_path / "kept"
    whole = invoke("run", PROMPT, "--max-tokens", "5", "--temperature", "0", "--context", "64", "--device", "sim:2")
    first = invoke(*RUN, "--device", "sim:2", "--save", file)
    assert first[0] == 0, first
    rest = invoke(
        "run", "--resume", file, "--max-tokens", "2", "--temperature", "0", "--context", "64", "--device", "sim:2"
    )
    assert rest[0] == 0, rest
    assert (first[1].rstrip("\n") + rest[1]).rstrip("\n") == whole[1].rstrip("\n")


def test_the_plan_shows_devices_and_adds_up(invoke):
    code, out, _ = invoke("plan", "--device", "sim:2", "--vram", "40MiB,20MiB", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["prediction"] is None
    assert [device["name"] for device in plan["devices"]] == ["simulated device 0", "simulated device 1"]
    for device in plan["devices"]:
        slots = sum(int(size) * count for size, count in device["num_slots"].items())
        used = device["dense_bytes"] + device["cache_bytes"] + device["pass_bytes"] + slots
        assert used <= device["free_bytes"]
    code, out, _ = invoke("plan", "--device", "sim:2", "--vram", "40MiB,20MiB")
    assert code == 0 and "simulated device 1" in out and "one graph a device" in out
    out = invoke("plan", "--device", "sim:1", "--vram", "20MiB", "--expert-slots", "8")[1]
    assert "the host waits once a layer" in out


def test_the_doctor_names_what_would_compute(invoke, monkeypatch):
    assert "simulated device 1" in invoke("doctor", "--device", "sim:2")[1]
    monkeypatch.setattr(machine, "gpu_absence", lambda *root: "no NVIDIA driver is loaded")
    assert "the CPU computes" in invoke("doctor")[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--device", "gpu"), "--device"),
        (("--device", "sim:1", "--vram", "1GiB,1GiB"), "--vram"),
        (("--device", "sim:1", "--vram", "1MiB"), "--context"),
        (("--device", "sim:1", "--kv", "f32"), "--kv"),
        (("--device", "sim:1", "--expert-bits", "2"), "stores"),
        (("--device", "sim:1", "--profile"), "--profile"),
    ],
)
def test_what_a_device_cannot_do_is_one_line(invoke, words, named):
    code, out, err = invoke(*RUN, *words)
    assert code in (1, 2) and out == ""
    assert err.count("\n") == 1 and err.startswith("glm-gpu: ") and named in err
