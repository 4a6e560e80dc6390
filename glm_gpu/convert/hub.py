"""HubSource: a repository of the Hugging Face hub at one pinned revision, fetched a shard at a time."""

import io
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from glm_gpu.checkpoint import FP8_SCALE_SUFFIX, Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.convert.hub_files import HubFiles
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.json_file import parse_json_object
from glm_gpu.safetensors_index import INDEX_FILE, ShardIndex, TensorInfo, parse_header, read_header
from glm_gpu.safetensors_write import write_safetensors
from glm_gpu.stored import SCALES_SUFFIX
from glm_gpu.tensors import expected_tensors, validate_tensors

_CARRY_PREFIX = "carry-"
# the largest header of GLM-5.2-FP8 has 0.2 MB
_FIRST_BYTES = 1 << 20
_HEADER_THREADS = 8


class HubSource:
    """A repository; its shards are on the disk only while they are needed.

    When a shard is passed, the few tensors of it that belong to an expert which the next one completes are copied into
    a small carry file and the shard is removed. So one shard is on the disk at a time, those few tensors, and, where
    there is room for it, the next shard, which is fetched while this one is converted. Where more than a quarter of a
    shard is still needed, it stays as it is.

    Args:
        repository: "owner/name".
        revision: branch, tag or commit; None for the default branch. Pinned to a commit at once.
        folder: for what is fetched; made when the first shard is.

    Raises:
        RequestError: on creation: huggingface_hub is not installed, or there is no such repository or revision.
        CheckpointError, UnsupportedModelError: on creation: the hub cannot be reached, or as `Checkpoint.open`.
    """

    def __init__(self, repository: str, revision: str | None, folder: Path) -> None:
        self.name, self._folder = repository, folder
        self._files = HubFiles(repository, revision)
        self.revision = self._files.revision
        config = self._files.read("config.json")
        self.config = ModelConfig.from_dict(parse_json_object(config, "config.json"), f"{repository}: config.json")
        self.shard_names = self._find_shards()
        self.tensors = self._read_headers()
        if any(name.endswith(SCALES_SUFFIX) for name in self.tensors):
            raise RequestError(f"{repository} is a container already; convert the checkpoint it was made from")
        with self._checkpoint(self.tensors) as checkpoint:
            self.has_mtp = validate_tensors(self.config, checkpoint)
        self._wanted = self._wanted_names()
        self.transfer_bytes = max(self._files.sizes[name] for name in self.shard_names)
        self._pending: dict[str, Future] = {}
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(1)

    def __enter__(self) -> "HubSource":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)
        self._files.close()

    def inputs(self, shards: Collection[str] | None = None) -> dict[str, str]:
        """Size and hash of each of these shards, or else of each file, as the hub gives them."""
        names = ("config.json", *self.shard_names) if shards is None else shards
        return {name: self._files.identity(name) for name in names}

    def side_file(self, name: str) -> bytes | None:
        """The content of a file beside the shards; None when the repository has none."""
        return self._files.read(name) if name in self._files.sizes else None

    @contextmanager
    def open(self, names: Collection[str], done: Collection[str]) -> Iterator[Checkpoint]:
        """A checkpoint with just these tensors; fetches what is missing, and removes what is done with."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pass_shards_before(max(self.tensors[name].shard.name for name in names), done)
        carried = self._carried()
        for shard in sorted({self.tensors[name].shard.name for name in names if name not in carried}):
            self._fetch(shard)
        with self._checkpoint({name: carried.get(name, self.tensors[name]) for name in names}) as checkpoint:
            yield checkpoint

    def prefetch(self, names: Iterable[str], free_bytes: int) -> None:
        """Begin to fetch the first shard that these tensors need and that is not here, if it fits; never waits."""
        if any(not future.done() for future in self._pending.values()):
            return
        here = {path.name for path in self._folder.glob("*.safetensors")} | self._pending.keys()
        shard = next((s for name in names if (s := self.tensors[name].shard.name) not in here), None)
        if shard is not None and self._files.sizes[shard] <= free_bytes:
            self._pending[shard] = self._executor.submit(self._files.fetch, shard, self._folder, self._stop)

    def finish(self) -> None:
        """Remove the folder of what was fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fetch(self, shard: str) -> None:
        """Wait until a shard is here. What a prefetch has begun and could not finish goes on where it was."""
        future = self._pending.pop(shard, None)
        if future is None or future.exception() is not None:
            self._files.fetch(shard, self._folder, self._stop)

    def _pass_shards_before(self, shard: str, done: Collection[str]) -> None:
        for path in sorted(self._folder.glob("*.safetensors")):
            is_carry = path.name.startswith(_CARRY_PREFIX)
            if not is_carry and path.name >= shard:
                continue
            infos = read_header(path)[1] if is_carry else self._tensors_of(path.name)
            left = {name: info for name, info in infos.items() if name in self._wanted and name not in done}
            left_bytes = sum(info.nbytes for info in left.values())
            if is_carry and left:
                continue
            if left_bytes > self._files.sizes.get(path.name, 0) // 4:
                continue
            if left:
                self._carry(path.name, left)
            path.unlink()

    def _carry(self, shard: str, infos: dict[str, TensorInfo]) -> None:
        with self._checkpoint(infos) as checkpoint:
            entries = [(*info[:3], partial(checkpoint.read_raw, info.name)) for info in infos.values()]
            write_safetensors(self._folder / (_CARRY_PREFIX + shard), entries)

    def _carried(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for path in sorted(self._folder.glob(f"{_CARRY_PREFIX}*.safetensors")):
            found |= read_header(path)[1]
        return found

    def _checkpoint(self, tensors: dict[str, TensorInfo]) -> Checkpoint:
        return Checkpoint(self._folder, self.config, None, ShardIndex(tensors, (), (), b""))

    def _tensors_of(self, shard: str) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.tensors.items() if info.shard.name == shard}

    def _wanted_names(self) -> set[str]:
        draft_prefix = f"model.layers.{self.config.mtp_layer}."
        weights = [name for name in expected_tensors(self.config) if self.has_mtp or not name.startswith(draft_prefix)]
        return {*weights, *(name + FP8_SCALE_SUFFIX for name in weights if name + FP8_SCALE_SUFFIX in self.tensors)}

    def _find_shards(self) -> tuple[str, ...]:
        if INDEX_FILE in self._files.sizes:
            weight_map = parse_json_object(self._files.read(INDEX_FILE), INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{self.name}: weight_map of {INDEX_FILE} is no object of file names")
            names = set(weight_map.values())
        else:
            names = {name for name in self._files.sizes if name.endswith(".safetensors") and "/" not in name}
        missing = sorted(names - self._files.sizes.keys())
        if missing or not names:
            raise CheckpointError(
                f"{self.name} at {self.revision}: no shard {missing[0] if missing else '*.safetensors'}; "
                "give a repository of safetensors"
            )
        return tuple(sorted(names))

    def _read_headers(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        with ThreadPoolExecutor(_HEADER_THREADS) as executor:
            for found in executor.map(self._read_header, self.shard_names):
                repeated = found.keys() & tensors.keys()
                if repeated:
                    raise CheckpointError(f"{self.name}: tensor {min(repeated)!r} is in two shards; convert a copy")
                tensors |= found
        return tensors

    def _read_header(self, shard: str) -> dict[str, TensorInfo]:
        size = self._files.sizes[shard]
        data = self._files.read_range(shard, 0, min(size, _FIRST_BYTES))
        header_end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < header_end <= size:
            data += self._files.read_range(shard, len(data), header_end)
        return parse_header(io.BytesIO(data), self._folder / shard, size)[1]
