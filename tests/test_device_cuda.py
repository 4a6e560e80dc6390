"""The CUDA device, through a stand-in for CuPy: the whole engine makes the calls that it would make on cards."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from device_models import greedy, on_devices, options_for
from fake_cupy import FakeCuda

from glm_gpu import machine
from glm_gpu.device import Arena, DeviceMemoryError, to_host
from glm_gpu.device_choice import DeviceRequest, open_devices
from glm_gpu.engine import Engine

MIB = 1 << 20


@pytest.fixture
def cards(monkeypatch):
    """cards(memories, **options) makes these cards be there."""
    monkeypatch.setattr(machine, "gpu_absence", lambda *root: None)
    monkeypatch.setattr("glm_gpu.opening.DEVICE_RESERVE", 0)
    monkeypatch.setattr("glm_gpu.device_link._NUM_BYTES", 64 << 10)

    def make(memories, **options) -> FakeCuda:
        cuda = FakeCuda(memories, **options)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14"))
        monkeypatch.setattr("glm_gpu.device_cuda.CudaLauncher", cuda.launcher)
        return cuda

    return make


@pytest.mark.parametrize("has_peers", [True, False])
def test_cards_give_the_simulated_devices_bits(cards, oracle_dir, has_peers):
    path, prompt_ids = oracle_dir / "tiny_olmoe", list(range(20))
    with Engine.open(path, options_for(path, devices=on_devices(64 * MIB))) as engine:
        expected = greedy(engine, prompt_ids, 5)[1]
    cuda = cards([MIB * 9 // 10, MIB * 8 // 10], has_peers=has_peers)
    with Engine.open(path, options_for(path, devices=DeviceRequest("cuda"))) as engine:
        assert [len(device.layers) > 0 for device in engine.plan.devices] == [True, True]
        assert np.array_equal(greedy(engine, prompt_ids, 5)[1], expected)
        assert (cuda.num_peer_copies > 0) == has_peers
    assert not cuda.blocks


def test_a_card_that_holds_everything_replays_graphs(cards, oracle_dir):
    path = oracle_dir / "tiny_olmoe"
    cards([64 * MIB])
    with Engine.open(path, options_for(path, devices=DeviceRequest("cuda"))) as engine:
        greedy(engine, range(20), 5)
        (captured,) = engine.model.chains[0]._graphs.values()
        assert len(captured.graphs) == 1


def test_c28_an_engine_runs_where_nothing_may_be_registered(cards, oracle_dir, caplog):
    path = oracle_dir / "tiny_olmoe"
    cuda = cards([MIB + 200_000])
    cuda.can_register = lambda num_bytes: False
    with Engine.open(path, options_for(path, devices=DeviceRequest("cuda"))) as engine:
        ids, logits = greedy(engine, range(20), 3)
        assert np.isfinite(logits).all() and len(ids) == 3
    assert sum("ulimit -l" in record.getMessage() for record in caplog.records) == 1


def test_a_bound_and_a_full_card_are_the_same_error_with_numbers(cards):
    cards([4 * MIB])
    (bounded,), _ = open_devices(DeviceRequest("cuda", vram="1MiB"))
    assert bounded.memory() == (MIB, 4 * MIB)
    arena = Arena(bounded, MIB)
    with pytest.raises(DeviceMemoryError, match=r"0 B of 4\.00 MiB are free"):
        Arena(bounded, 1)
    arena.close()
    assert bounded.memory()[0] == MIB
    (whole,), _ = open_devices(DeviceRequest("cuda"))
    with pytest.raises(DeviceMemoryError, match="--vram"):
        Arena(whole, 5 * MIB)


def test_arrays_go_up_and_come_back(cards):
    cards([MIB])
    (device,), _ = open_devices(DeviceRequest("cuda"))
    arena = Arena(device, MIB // 2)
    values = np.arange(1000, dtype=np.float32)
    first, second = arena.put(values, "f32"), arena.put(values.astype(np.uint16), "bf16")
    assert first.ptr % 256 == second.ptr % 256 == 0 and first.ptr + first.nbytes <= second.ptr
    assert np.array_equal(to_host(device, first), values)
    assert np.array_equal(to_host(device, second), values.astype(np.uint16))
    device.close()
    device.close()
