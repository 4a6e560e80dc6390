"""What a folder holds of a conversion when it starts: nothing, a part of this one, all of it, or something else."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from glm_gpu.convert.hashing import hash_files
from glm_gpu.convert.journal import JOURNAL_FILE, Journal
from glm_gpu.convert.plan import ConversionPlan
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.manifest import MANIFEST_FILE, Manifest, ShardRecord
from glm_gpu.safetensors_write import TEMPORARY_SUFFIX


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Make a folder if need be and keep other conversions out of it.

    Raises:
        RequestError: another process converts into it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RequestError(f"{folder}: cannot be made or opened ({error.strerror}); give another folder") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"{folder}: another conversion is writing there; wait for it, or give another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def finished_shards(folder: Path, plan: ConversionPlan, expected: Manifest) -> dict[str, ShardRecord] | None:
    """The records of a container that is complete and is the one asked for; None when none is complete.

    Raises:
        RequestError: it is another container; names what differs.
        CheckpointError: its shards have other sizes than its manifest says.
    """
    if (folder / JOURNAL_FILE).exists():
        return None
    found = Manifest.open(folder)
    if found is None:
        return None
    for name_class in sorted(found.classes.keys() | expected.classes.keys()):
        mine, asked = found.classes.get(name_class), expected.classes.get(name_class)
        if mine != asked:
            raise RequestError(
                f"{folder} holds a container whose {name_class} weights are {_shown(mine)}, asked for {_shown(asked)}; "
                "give another folder"
            )
    for field in ("source", "revision", "rounding", "tool", "shapes"):
        mine, asked = getattr(found, field), getattr(expected, field)
        if mine != asked:
            raise RequestError(
                f"{folder} holds a container with {field} {mine!r:.80}, asked for {asked!r:.80}; give another folder"
            )
    if set(found.shards) != {shard.name for shard in plan.shards}:
        raise RequestError(f"{folder} holds a container of {len(found.shards)} shards, asked for {len(plan.shards)}; "
                           "give another folder, or the same --shard-size")  # fmt: skip
    found.validate({path.name: path.stat().st_size for path in folder.glob("*.safetensors")})
    return found.shards


def continue_or_begin(
    folder: Path, asked: Journal, plan: ConversionPlan, threads: int, on_checked: Callable[[str], None]
) -> Journal:
    """The journal to go on with, on the disk: the folder's own if this conversion has begun there, else a new one.

    Shards with a record are hashed, `threads` at a time, and left alone; half-written ones are removed.

    Raises:
        RequestError, CheckpointError: as `Journal.refuse_other`; a shard differs from its record, or has none.
    """
    journal = Journal.read(folder)
    if journal is None:
        stranger = next((path for path in sorted(folder.glob("*.safetensors"))), None)
        if stranger or (folder / MANIFEST_FILE).exists():
            raise RequestError(
                f"{folder} holds {(stranger or folder / MANIFEST_FILE).name}, which no unfinished conversion there has "
                "written; give an empty folder"
            )
        asked.write(folder)
        return asked
    journal.refuse_other(asked, folder)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    for name in sorted(sizes):
        if name not in journal.shards:
            raise RequestError(
                f"{folder / name}: not written by the conversion that was begun there; move it away and run again"
            )
        if sizes[name] != journal.shards[name].nbytes:
            _refuse_damaged(folder / name, f"{sizes[name]} bytes", f"{journal.shards[name].nbytes}")
    hashes = hash_files([folder / name for name in sorted(sizes)], threads, lambda path: on_checked(path.name))
    for path, sha256 in hashes.items():
        if sha256 != journal.shards[path.name].sha256:
            _refuse_damaged(path, f"SHA-256 {sha256}", journal.shards[path.name].sha256)
    for name in journal.shards.keys() - sizes.keys():
        del journal.shards[name]
    for shard in plan.shards:
        (folder / (shard.name + TEMPORARY_SUFFIX)).unlink(missing_ok=True)
    return journal


def _refuse_damaged(path: Path, found: str, expected: str):
    raise CheckpointError(f"{path}: {found}, expected {expected}; delete this shard and run the same command again")


def _shown(stored) -> str:
    return "plain numbers" if stored is None else f"{stored.format.name} with {stored.scale_dtype} scales"
