"""Conversion from a hub repository: a server on this machine answers as the hub does, with its revisions and ranges."""

import hashlib
import json
import re
import socket
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

constants = pytest.importorskip("huggingface_hub.constants")

from small_sources import AWKWARD_CONFIG, make_awkward_source, write_shards  # noqa: E402

from glm_gpu.checkpoint import Checkpoint  # noqa: E402
from glm_gpu.convert import hub_files  # noqa: E402
from glm_gpu.convert.convert import convert  # noqa: E402
from glm_gpu.convert.hub import HubSource  # noqa: E402
from glm_gpu.convert.settings import ConvertSettings  # noqa: E402
from glm_gpu.convert.source import LocalSource, open_source  # noqa: E402
from glm_gpu.errors import CheckpointError, RequestError, UnsupportedModelError  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SETTINGS = ConvertSettings(shard_bytes=128 << 10, rounding="rtn")


class FakeHub(ThreadingHTTPServer):
    """Serves one folder as owner/model at one commit.

    Attributes:
        requests: how often each (file, range) was asked for.
        fail_after: bytes of shards after which every further range is refused; None never.
        on_request: called with a file's name before it is answered.
    """

    daemon_threads = False  # closing waits for them

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.connections: list[socket.socket] = []
        self.requests: Counter = Counter()
        self.fail_after: int | None = None
        self.on_request = lambda name: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request, client_address) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        """Also closes connections that a client keeps for its next request."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def model_info(self) -> dict:
        siblings = []
        for path in sorted(self.folder.iterdir()):
            content = path.read_bytes()
            entry = {"rfilename": path.name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            if path.suffix == ".safetensors":
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": "owner/model", "sha": COMMIT, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if re.fullmatch(rf"/api/models/owner/model(/revision/(main|{COMMIT}))?", path):
            self._answer(200, json.dumps(self.server.model_info()).encode())
        elif match := re.fullmatch(rf"/owner/model/resolve/{COMMIT}/(.+)", path):
            self._file(match[1])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if "/revision/" not in path else "RevisionNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _file(self, name: str) -> None:
        server = self.server
        begin, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        server.on_request(name)
        server.requests[name, begin, end] += 1
        if server.fail_after is not None and name.endswith(".safetensors") and begin > 0:
            server.fail_after -= end + 1 - begin
            if server.fail_after < 0:
                self._answer(403, b"")
                return
        self._answer(206, (server.folder / name).read_bytes()[begin : end + 1])

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory):
    """Nine shards, so that borders tear experts, and FP8 weights from their scales."""
    return make_awkward_source(tmp_path_factory.mktemp("hub") / "source", "fp8", num_shards=9)


@pytest.fixture
def hub(source_dir, monkeypatch):
    server = FakeHub(source_dir)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub_files, "_RANGE_BYTES", 10_000)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def local_shards(source_dir, tmp_path):
    """What the same folder gives when it is converted as one."""
    with LocalSource(source_dir) as source:
        return convert(source, tmp_path / "local", SETTINGS, threads=2).shards


def run_conversion(out: Path, revision: str | None = None, **options):
    with HubSource("owner/model", revision, out / "download") as source:
        return convert(source, out, SETTINGS, threads=2, **options)


def test_repository_gives_the_container_of_the_folder_and_is_pinned(hub, local_shards, tmp_path):
    out = tmp_path / "out"
    assert run_conversion(out, "main").shards == local_shards
    manifest = json.loads((out / "glm_gpu.json").read_text())
    assert (manifest["source"], manifest["revision"]) == ("owner/model", COMMIT)
    assert not (out / "download").exists()
    assert (out / "config.json").read_bytes() == (hub.folder / "config.json").read_bytes()


def test_every_byte_of_a_shard_is_fetched_once_beside_its_header(hub, tmp_path):
    run_conversion(tmp_path / "out")
    counts = {key: count for key, count in hub.requests.items() if key[0].endswith(".safetensors") and key[1] > 0}
    assert set(counts.values()) == {1}
    for path in hub.folder.glob("*.safetensors"):
        ends = sorted(end for name, begin, end in hub.requests if name == path.name and end - begin < 10_000)
        assert ends[-1] == path.stat().st_size - 1


def test_disk_holds_one_source_shard_and_what_its_border_tears_when_there_is_no_room_for_more(
    hub, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    hub.folder = make_awkward_source(tmp_path / "source", "fp8", num_shards=4)
    sizes = {path.name: path.stat().st_size for path in hub.folder.glob("*.safetensors")}
    with LocalSource(hub.folder) as source:
        local_shards = convert(source, tmp_path / "local", SETTINGS, threads=2).shards
    monkeypatch.setattr(HubSource, "prefetch", lambda *_: None)
    most_shards = most_carried = 0

    def look(_):
        nonlocal most_shards, most_carried
        names = [path.name for path in (out / "download").glob("model-*")]
        most_shards = max(most_shards, len(names))
        with suppress(FileNotFoundError):  # looked at beside the conversion, which removes them
            carried = sum(path.stat().st_size for path in (out / "download").glob("carry-*.safetensors"))
            most_carried = max(most_carried, carried)

    hub.on_request = look
    assert run_conversion(out, on_progress=look).shards == local_shards
    assert most_shards == 1
    assert 0 < most_carried < max(sizes.values()) / 3


def test_shard_of_which_most_is_still_needed_stays(hub, tmp_path):
    # all matrices of one role in a shard of their own, as some re-exports have them: every expert is torn
    source = make_awkward_source(tmp_path / "source", "fp8", 1)
    with Checkpoint.open(source) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.names]
        entries = [(*info[:3], checkpoint.read_raw(info.name)) for info in infos]
    order = sorted(entries, key=lambda entry: ("gate_proj" in entry[0]) + 2 * ("up_proj" in entry[0]))
    for path in source.glob("*.safetensors"):
        path.unlink()
    write_shards(source, order, 3)
    hub.folder = source
    with LocalSource(source) as local:
        expected = convert(local, tmp_path / "local", SETTINGS, threads=2).shards
    assert run_conversion(tmp_path / "out").shards == expected


def test_next_shard_is_fetched_while_one_is_converted_where_there_is_room(hub, local_shards, tmp_path):
    out = tmp_path / "out"
    seen = set()

    def look(progress):
        seen.add(len(list((out / "download").glob("model-*.safetensors*"))))

    assert run_conversion(out, on_progress=look).shards == local_shards
    assert max(seen) <= 3


def test_interrupted_download_goes_on_where_it_was(hub, local_shards, tmp_path):
    out = tmp_path / "out"
    hub.fail_after = 200_000
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_conversion(out)
    asked_before = dict(hub.requests)
    part = next((out / "download").glob("*.part"))
    part_bytes = part.stat().st_size
    assert part_bytes > 0
    hub.fail_after = None
    hub.requests.clear()
    assert run_conversion(out).shards == local_shards
    name = part.name.removesuffix(".part")
    assert min(begin for file, begin, end in hub.requests if file == name and end - begin < 10_000) in (0, part_bytes)
    again = [key for key in hub.requests if key in asked_before and key[0] == name and 0 < key[1] < part_bytes]
    assert not again


def test_kill_between_shards_resumes_without_the_shards_that_are_done(hub, local_shards, tmp_path):
    out = tmp_path / "out"

    def stop(progress):
        if progress.num_written == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_conversion(out, on_progress=stop)
    hub.requests.clear()
    assert run_conversion(out).shards == local_shards
    whole_reads = {name for name, begin, _ in hub.requests if begin > 0}
    assert "model-00001-of-00009.safetensors" not in whole_reads


def test_content_with_another_hash_is_refused_by_name(hub, tmp_path, monkeypatch):
    real = FakeHub.model_info

    def model_info(self):
        info = real(self)
        for entry in info["siblings"]:
            if entry["rfilename"] == "model-00002-of-00009.safetensors":
                entry["lfs"]["sha256"] = "0" * 64
        return info

    monkeypatch.setattr(FakeHub, "model_info", model_info)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00009.safetensors arrived with SHA-256"):
        run_conversion(tmp_path / "out")


def test_source_shard_stays_until_the_output_of_it_is_on_the_disk(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("glm_gpu.convert.convert.hash_file", lambda path, from_disk: "another")
    with pytest.raises(CheckpointError, match="gives back other bytes"):
        run_conversion(tmp_path / "out")
    assert (tmp_path / "out/download/model-00001-of-00009.safetensors").exists()
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_unknown_repository_revision_and_family_are_refused(hub, source_dir, tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="no such repository"):
        HubSource("owner/other", None, tmp_path)
    with pytest.raises(RequestError, match="no such repository or revision"):
        HubSource("owner/model", "nowhere", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(AWKWARD_CONFIG | {"model_type": "llama"}))
    hub.folder = other
    with pytest.raises(UnsupportedModelError, match="llama"):
        open_source("owner/model", None, tmp_path / "download")
    assert not [name for name, *_ in hub.requests if name.endswith(".safetensors")]


def test_hub_that_cannot_be_reached_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="check the network"):
        HubSource("owner/model", None, tmp_path)
