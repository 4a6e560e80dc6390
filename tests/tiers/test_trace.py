"""Traces: what is recorded is read, and a run that dies leaves all but its last frame."""

import numpy as np
import pytest

from glm_gpu.errors import RequestError
from glm_gpu.tiers import trace as trace_module
from glm_gpu.tiers.trace import Routing, TraceHeader, TraceWriter, read_trace

HEADER = TraceHeader("f00d", 5, 64, 4, (0, 100, 100, 100, 200))
WIDE = TraceHeader("f00d", 5, 300, 2, (0, 100, 100, 100, 200))


def some_routings(header: TraceHeader, count: int) -> list[Routing]:
    rng = np.random.default_rng(7)
    return [
        Routing(
            "prefill" if n % 3 == 0 else "decode",
            1 + n % 4,
            rng.integers(0, header.num_experts, (5 if n % 3 == 0 else 1, header.experts_per_tok)),
        )
        for n in range(count)
    ]


def write(path, header, routings):
    with TraceWriter(path, header) as writer:
        for routing in routings:
            writer.record(routing.layer, routing.ids, len(routing.ids) if routing.phase == "decode" else 0)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.phase, one.layer) == (other.phase, other.layer)
        np.testing.assert_array_equal(one.ids, other.ids)


@pytest.mark.parametrize("header", [HEADER, WIDE], ids=["one byte an id", "two bytes an id"])
def test_what_was_recorded_is_read(tmp_path, monkeypatch, header):
    monkeypatch.setattr(trace_module, "_FRAME_BYTES", 500)
    routings = some_routings(header, 300)
    write(tmp_path / "t", header, routings)
    trace = read_trace(tmp_path / "t")
    assert trace.header == header and not trace.is_torn
    assert_same(trace.routings, routings)
    assert trace.tokens("prefill") == max(
        sum(len(r.ids) for r in routings if r.layer == layer and r.phase == "prefill") for layer in range(1, 5)
    )


def test_a_run_that_dies_loses_at_most_its_last_frame(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "_FRAME_BYTES", 500)
    routings = some_routings(HEADER, 300)
    writer = TraceWriter(tmp_path / "t", HEADER)
    for routing in routings:
        writer.record(routing.layer, routing.ids, len(routing.ids) if routing.phase == "decode" else 0)
    found = read_trace(tmp_path / "t").routings  # not closed, not flushed
    assert len(found) > 250
    assert_same(found, routings[: len(found)])
    writer.close()


def test_every_torn_or_damaged_file_gives_its_whole_frames_or_a_named_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trace_module, "_FRAME_BYTES", 200)
    routings = some_routings(HEADER, 60)
    path = tmp_path / "t"
    write(path, HEADER, routings)
    good = path.read_bytes()
    body = good.index(b"\n", 20) + 1
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        if length < body - 1:
            with pytest.raises(RequestError, match="trace"):
                read_trace(path)
        else:
            found = read_trace(path)
            assert_same(found.routings, routings[: len(found.routings)])
    for place in range(body, len(good), 11):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        caplog.clear()
        found = read_trace(path)
        assert found.is_torn and len(found.routings) < len(routings)
        assert len(caplog.records) == 1
        assert_same(found.routings, routings[: len(found.routings)])


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trace_module, "_FRAME_BYTES", 100)
    routings = some_routings(HEADER, 60)
    path = tmp_path / "t"

    class FullDisk:
        def __init__(self, file):
            self.file, self.left = file, 700

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    writer = TraceWriter(path, HEADER)
    writer._file = FullDisk(writer._file)
    for routing in routings:
        writer.record(routing.layer, routing.ids, len(routing.ids) if routing.phase == "decode" else 0)
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: the trace ends here (No space left on device)"
    ]
    found = read_trace(path).routings
    assert 0 < len(found) < 60
    assert_same(found, routings[: len(found)])


def test_a_trace_that_cannot_be_made_is_refused_before_the_run(tmp_path):
    with pytest.raises(RequestError, match="cannot be written"):
        TraceWriter(tmp_path / "absent" / "t", HEADER)


def test_experts_and_layers_that_the_header_does_not_have_are_refused(tmp_path):
    write(tmp_path / "t", TraceHeader("f00d", 9, 64, 4, (100,) * 9), [Routing("decode", 8, np.array([[1, 2, 3, 4]]))])
    data = (tmp_path / "t").read_bytes().replace(b'"num_layers": 9', b'"num_layers": 8', 1)
    (tmp_path / "t").write_bytes(data.replace(b"[" + b"100, " * 8 + b"100]", b"[" + b"100, " * 7 + b"100]", 1))
    with pytest.raises(RequestError, match="layer 8"):
        read_trace(tmp_path / "t")
