"""Host memory for copies: registered as far as the system lets it be, and never less than it can."""

import logging

import numpy as np
import pytest

from glm_gpu.device_sim import SimDevice
from glm_gpu.pinned import PinnedRange, pin

KIB = 1 << 10


@pytest.fixture
def device():
    return SimDevice(0, 1 << 20)


def memory(num_bytes: int) -> np.ndarray:
    return np.zeros(num_bytes, np.uint8)


def test_everything_is_registered_where_nothing_is_refused(device, caplog):
    ranges = pin(device, [memory(10 * KIB), memory(3)], 1 << 20, chunk_bytes=4 * KIB)
    assert [each.num_bytes for each in ranges] == [10 * KIB, 3]
    assert device.registered_bytes == 10 * KIB + 3
    for each in ranges:
        each.close()
        each.close()
    assert device.registered_bytes == 0 and not caplog.records


def test_c28_nothing_of_no_size_is_registered(device):
    device.refuse_register = lambda registered, num_bytes: num_bytes == 0 and pytest.fail("zero bytes registered")
    ranges = pin(device, [memory(0), memory(8 * KIB), memory(0)], 8 * KIB, chunk_bytes=4 * KIB)
    assert [each.num_bytes for each in ranges] == [0, 8 * KIB, 0]
    assert PinnedRange(device, memory(5), 0).num_bytes == 0


def test_c28_a_limit_is_filled_with_smaller_pieces_and_what_was_lost_is_said_once(device, caplog, monkeypatch):
    monkeypatch.setattr("glm_gpu.pinned.MIN_CHUNK_BYTES", KIB)
    device.refuse_register = lambda registered, num_bytes: registered + num_bytes > 7 * KIB  # as RLIMIT_MEMLOCK
    with caplog.at_level(logging.WARNING):
        ranges = pin(device, [memory(16 * KIB), memory(16 * KIB)], 32 * KIB, chunk_bytes=4 * KIB)
    assert sum(each.num_bytes for each in ranges) == device.registered_bytes == 7 * KIB
    (record,) = caplog.records
    assert "25.0 KiB" in record.getMessage() and "ulimit -l" in record.getMessage()


def test_c28_a_refusal_by_chance_loses_nothing(device, monkeypatch):
    monkeypatch.setattr("glm_gpu.pinned.MIN_CHUNK_BYTES", KIB)
    calls = []

    def refuse(registered, num_bytes):
        calls.append(num_bytes)
        return len(calls) == 3

    device.refuse_register = refuse
    (one,) = pin(device, [memory(16 * KIB)], 16 * KIB, chunk_bytes=4 * KIB)
    assert one.num_bytes == 16 * KIB


def test_only_as_much_is_registered_as_was_asked(device):
    ranges = pin(device, [memory(4 * KIB), memory(8 * KIB), memory(8 * KIB)], 6 * KIB, chunk_bytes=4 * KIB)
    assert [each.num_bytes for each in ranges] == [4 * KIB, 2 * KIB, 0]
