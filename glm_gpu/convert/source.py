"""Where a conversion's weights come from: a folder on this machine, or a repository of the Hugging Face hub."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.safetensors_index import TensorInfo
from glm_gpu.tensors import validate_tensors

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<model>.+)/snapshots/(?P<revision>[0-9a-f]{40})")
# Read of each shard to tell whether it is still the same: a file of other weights differs in every one of them.
_SAMPLES = 16
_SAMPLE_BYTES = 4096


class Source(Protocol):
    """A checkpoint that is converted; a context manager.

    Attributes:
        name: as the manifest will call it.
        revision: of the repository, if known.
        config: its config.json.
        tensors: every tensor's type, shape and shard, by name; offsets count only for tensors of an open checkpoint.
        has_mtp: whether the draft layer is there.
        shard_names: its files with weights, in order.
        transfer_bytes: disk that fetching takes beside the output, at most; 0 for a folder.
    """

    name: str
    revision: str | None
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    has_mtp: bool
    shard_names: tuple[str, ...]
    transfer_bytes: int

    def __enter__(self) -> "Source": ...

    def __exit__(self, *exception: object) -> None: ...

    def inputs(self, shards: Collection[str] | None = None) -> dict[str, str]:
        """For each of these shards, or else for each file, a text that changes when the file does."""

    def side_file(self, name: str) -> bytes | None:
        """The content of a file beside the shards; None when there is none."""

    def open(self, names: Collection[str], done: Collection[str]) -> AbstractContextManager[Checkpoint]:
        """A checkpoint with at least these tensors, to be closed afterwards; waits until they are on this machine.

        Args:
            names: to be read now.
            done: will not be asked for again; what is fetched and has no other tensors may be removed.
        """

    def prefetch(self, names: Iterable[str], free_bytes: int) -> None:
        """Begin to fetch the first shard that these tensors need and that is not here; never waits.

        Nothing happens when it is larger than `free_bytes`.
        """

    def finish(self) -> None:
        """Remove whatever was fetched; the conversion is complete."""


class LocalSource:
    """A checkpoint folder, or a snapshot in the hub's cache; never written, links are followed.

    Args:
        path: the folder.

    Raises:
        CheckpointError, UnsupportedModelError: on creation: as `Checkpoint.open`, or weights are missing.
        RequestError: on creation: it holds packed weights already.
    """

    transfer_bytes = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint = Checkpoint.open(path)
        try:
            self.config = self._checkpoint.config
            self.name, self.revision = _local_name(path)
            self.shard_names = tuple(path.name for path in self._checkpoint.shards)
            self.tensors = {name: self._checkpoint.info(name) for name in self._checkpoint.names}
            packed = next((name for name in self.tensors if self._checkpoint.stored(name)), None)
            if packed:
                raise RequestError(
                    f"{path} is a container already ({packed} is packed); convert the checkpoint it was made from"
                )
            self.has_mtp = validate_tensors(self.config, self._checkpoint)
        except BaseException:
            self._checkpoint.close()
            raise

    def __enter__(self) -> "LocalSource":
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoint.close()

    def inputs(self, shards: Collection[str] | None = None) -> dict[str, str]:
        """Size, time of change and a sampled hash of each of these shards, or else of each file."""
        files = (self.path / "config.json", *self._checkpoint.shards)
        return {path.name: _identity(path) for path in files if shards is None or path.name in shards}

    def side_file(self, name: str) -> bytes | None:
        """The content of a file beside the shards; None when there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be read ({error.strerror})") from None

    @contextmanager
    def open(self, names: Collection[str], done: Collection[str]) -> Iterator[Checkpoint]:
        """The folder's checkpoint; nothing to wait for or to remove."""
        yield self._checkpoint

    def prefetch(self, names: Iterable[str], free_bytes: int) -> None:
        """Nothing to fetch."""

    def finish(self) -> None:
        """Nothing to remove."""


def open_source(text: str, revision: str | None, download_dir: Path) -> Source:
    """The source that a command line names: a folder if there is one of that name, else a repository OWNER/NAME.

    Args:
        text: folder or repository id.
        revision: branch, tag or commit of a repository; None for its default branch.
        download_dir: where shards of a repository are kept while they are needed.

    Raises:
        RequestError: it is neither, or a revision is given for a folder.
        CheckpointError, UnsupportedModelError: as `LocalSource` and `HubSource`.
    """
    path = Path(text)
    if path.is_dir():
        if revision is not None:
            raise RequestError(f"--revision {revision} is for hub repositories, and {text} is a folder; drop it")
        return LocalSource(path)
    if _REPOSITORY.fullmatch(text):
        from glm_gpu.convert.hub import HubSource

        return HubSource(text, revision, download_dir)
    raise RequestError(f"{text}: no such folder, and no repository id like zai-org/GLM-5.2-FP8; check the name")


def _local_name(path: Path) -> tuple[str, str | None]:
    resolved = path.resolve()
    match = _SNAPSHOT.search(resolved.as_posix())
    if match:
        return f"{match['owner']}/{match['model']}", match["revision"]
    return resolved.name or str(resolved), None


def _identity(path: Path) -> str:
    try:
        status = path.stat()
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            for sample in range(_SAMPLES):
                file.seek(status.st_size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check the source") from None
    return f"{status.st_size} bytes, changed {status.st_mtime_ns} ns, sample {digest.hexdigest()[:16]}"
