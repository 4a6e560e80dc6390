"""verify: whether a container is whole, every byte of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm_gpu import machine
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.convert.hashing import hash_files
from glm_gpu.convert.journal import Journal
from glm_gpu.errors import CheckpointError
from glm_gpu.manifest import MANIFEST_FILE
from glm_gpu.tensors import validate_tensors


@dataclass(frozen=True)
class ShardCheck:
    """One shard: its size, the SHA-256 of what the disk holds, and the one the manifest expects, if there is one."""

    name: str
    nbytes: int
    sha256: str | None
    expected_sha256: str | None

    @property
    def problem(self) -> str | None:
        """What is wrong with it; None when nothing is known to be."""
        if self.sha256 is None:
            return f"{self.name}: cannot be read; check the disk"
        if self.expected_sha256 is not None and self.sha256 != self.expected_sha256:
            return (
                f"{self.name}: SHA-256 {self.sha256}, {MANIFEST_FILE} expects {self.expected_sha256}; "
                "copy or convert this shard again"
            )
        return None


@dataclass(frozen=True)
class Verification:
    """What a check of a whole container has found.

    Attributes:
        shards: each, in order.
        num_tensors: whose place, type and shape were checked.
        has_manifest: without one, hashes have nothing to be compared with.
        has_mtp: whether the draft layer is there.
    """

    shards: tuple[ShardCheck, ...]
    num_tensors: int
    has_manifest: bool
    has_mtp: bool

    @property
    def problems(self) -> tuple[str, ...]:
        """Every damaged shard."""
        return tuple(shard.problem for shard in self.shards if shard.problem)

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return sum(shard.nbytes for shard in self.shards)


def verify(
    folder: Path, threads: int | None = None, on_shard: Callable[[str], None] = lambda name: None
) -> Verification:
    """Check a container: headers against manifest, every tensor the model needs, and the hash of every shard.

    Also works on a checkpoint or container without manifest; then all but the hashes is proven.

    Args:
        threads: shards that are hashed at a time; the physical cores when not given.
        on_shard: called with each shard's name when it has been hashed.

    Raises:
        CheckpointError, UnsupportedModelError: headers, manifest and config do not fit each other; names the shard. The
            folder's conversion is not finished.
    """
    refuse_unfinished(folder)
    with Checkpoint.open(folder) as checkpoint:
        has_mtp = validate_tensors(checkpoint.config, checkpoint)
        records = checkpoint.manifest.shards if checkpoint.manifest else {}
        hashes = hash_files(
            checkpoint.shards, threads or machine.num_physical_cores(), lambda path: on_shard(path.name)
        )
        shards = tuple(
            ShardCheck(
                path.name, path.stat().st_size, sha256, records[path.name].sha256 if path.name in records else None
            )
            for path, sha256 in hashes.items()
        )
        return Verification(shards, len(checkpoint.names), bool(records), has_mtp)


def refuse_unfinished(folder: Path) -> None:
    """Check that no conversion into a folder is still to be finished.

    Raises:
        CheckpointError: one is; the message says how to go on.
    """
    journal = Journal.read(folder)
    if journal is not None:
        raise CheckpointError(
            f"{folder}: its conversion from {journal.source} is not finished, {len(journal.shards)} shards are; "
            "run the same `glm-gpu convert` again"
        )
