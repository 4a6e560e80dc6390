"""convert: a container from a checkpoint, one shard at a time; interrupted at any moment, it goes on where it was."""

import errno
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from glm_gpu import __version__, machine
from glm_gpu.convert.blocks import ShardBlocks, StageTimes
from glm_gpu.convert.hashing import hash_file
from glm_gpu.convert.journal import JOURNAL_FILE, Journal, replace_file
from glm_gpu.convert.plan import ConversionPlan, PlannedShard, plan_conversion
from glm_gpu.convert.resume import continue_or_begin, finished_shards, sole_user
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import SIDE_FILES, LocalSource, Source
from glm_gpu.errors import CapacityError, CheckpointError, RequestError
from glm_gpu.manifest import MANIFEST_FILE, ShardRecord
from glm_gpu.safetensors_write import TEMPORARY_SUFFIX, WrittenShard, write_safetensors
from glm_gpu.units import format_bytes

TOOL = f"glm-gpu {__version__}"
# kept free for journal and manifest, which are replaced by writing a second one beside the first
_SPARE_BYTES = 1 << 20


@dataclass
class Progress:
    """How far a conversion is; the same object at every report.

    Attributes:
        num_shards, total_bytes: of the container.
        num_finished, finished_bytes: shards on the disk.
        num_written: of them by this run.
        activity: what is being done, in words.
        times: seconds and bytes of the stages, of this run.
    """

    num_shards: int
    total_bytes: int
    num_finished: int = 0
    finished_bytes: int = 0
    num_written: int = 0
    activity: str = ""
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True)
class ConversionReport:
    """What came of a conversion.

    Attributes:
        shards: the container's, by file name.
        num_written: of them by this run; the others were there.
        dropped: source tensors the model does not use, left out.
        has_mtp: whether the container has the draft layer.
        missing_files: side files that the source does not have.
        times: of this run.
    """

    shards: dict[str, ShardRecord]
    num_written: int
    dropped: tuple[str, ...]
    has_mtp: bool
    missing_files: tuple[str, ...]
    times: StageTimes


def convert(
    source: Source,
    out: Path,
    settings: ConvertSettings,
    threads: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ConversionReport:
    """Write the source's weights as a container into a folder, or go on with what an interrupted call has begun there.

    Each shard is written under a temporary name, flushed, recorded in the journal, and renamed. When a conversion goes
    on, finished shards are checked against their recorded hashes, at the disk's speed, and never written again. The
    bytes depend on source and settings alone, not on interruptions or threads.

    Args:
        source: open; its files are only read.
        out: made if it is not there; must not hold anything else's shards.
        settings: what the container shall be like.
        threads: of decoding and quantizing; one for each physical core when not given.
        on_progress: called when a step begins or ends.

    Raises:
        RequestError: the folder holds another container, or one begun with other settings.
        CheckpointError: a weight is not finite or cannot be read; the source has changed; a finished shard is damaged.
        CapacityError: the disk is too small, or has filled up; finished shards stay.
    """
    if isinstance(source, LocalSource) and out.resolve() == source.path.resolve():
        raise RequestError(f"{out} is the source itself; give another folder for --out")
    plan = plan_conversion(source.config, source.tensors, settings, source.has_mtp)
    threads = threads or machine.num_physical_cores()
    progress = Progress(len(plan.shards), plan.nbytes)
    side_files = {name: source.side_file(name) for name in SIDE_FILES}
    asked = Journal(TOOL, source.name, source.revision, settings, plan.digest(), source.inputs())
    with sole_user(out):
        shards = finished_shards(out, plan, plan.manifest(source.config, asked))
        if shards is None:
            with _disk_full_as_capacity_error(out, plan, asked):
                journal = continue_or_begin(out, asked, plan, threads, partial(_report_checked, progress, on_progress))
            progress.num_finished = len(journal.shards)
            progress.finished_bytes = sum(record.nbytes for record in journal.shards.values())
            with _disk_full_as_capacity_error(out, plan, journal):
                _check_space(out, plan, journal, source.transfer_bytes)
                for name, content in side_files.items():
                    if content is not None:
                        replace_file(out / name, content)
                with ThreadPoolExecutor(threads) as executor:
                    _write_shards(source, out, plan, journal, executor, threads + 2, progress, on_progress)
                if settings.container != "colibri":
                    replace_file(out / MANIFEST_FILE, plan.manifest(source.config, journal).to_json().encode())
            (out / JOURNAL_FILE).unlink()
            shards = journal.shards
        source.finish()
    missing = tuple(name for name, content in side_files.items() if content is None)
    return ConversionReport(shards, progress.num_written, plan.dropped, source.has_mtp, missing, progress.times)


def _write_shards(
    source: Source, out: Path, plan: ConversionPlan, journal: Journal, executor: Executor, ahead: int,
    progress: Progress, on_progress: Callable[[Progress], None],
) -> None:  # fmt: skip
    done = {name for shard in plan.shards if shard.name in journal.shards for name in shard.reads}
    left = [shard for shard in plan.shards if shard.name not in journal.shards]
    for number, shard in enumerate(left):
        progress.activity = f"writing {shard.name}"
        on_progress(progress)
        free_bytes = machine.disk_free_bytes(out)
        if free_bytes < shard.nbytes + _SPARE_BYTES:
            raise _disk_full(out, plan, journal, free_bytes)
        with source.open(shard.reads, done) as checkpoint:
            left_bytes = sum(shard.nbytes for shard in left[number:])
            later = (name for shard in left[number + 1 :] for name in shard.reads)
            source.prefetch(later, machine.disk_free_bytes(out) - left_bytes - _SPARE_BYTES)
            blocks = ShardBlocks(checkpoint, shard, plan.shapes, journal.settings, executor, ahead, progress.times)
            with closing(blocks):
                began, waited = time.perf_counter(), progress.times.wait_s
                record = partial(_record, source, out, shard, journal)
                write_safetensors(out / shard.name, blocks.entries(), before_rename=record)
                waited = progress.times.wait_s - waited
                progress.times.add(write_s=time.perf_counter() - began - waited, write_bytes=shard.nbytes)
        done.update(shard.reads)
        progress.num_finished += 1
        progress.finished_bytes += shard.nbytes
        progress.num_written += 1
        progress.activity = f"finished {shard.name}"
        on_progress(progress)


def _record(source: Source, out: Path, shard: PlannedShard, journal: Journal, written: WrittenShard) -> None:
    """Put a shard whose bytes are on the disk, still under its temporary name, into the journal."""
    assert written.nbytes == shard.nbytes, (shard.name, written.nbytes, shard.nbytes)
    files = {source.tensors[name].shard.name for name in shard.reads}
    for name, identity in source.inputs(files).items():
        if journal.inputs[name] != identity:
            raise CheckpointError(
                f"{name}: the source file was changed while it was converted; restore it and run again"
            )
    if source.transfer_bytes:  # what was fetched may be removed next, so the disk must prove that it has the result
        partial_file = out / (shard.name + TEMPORARY_SUFFIX)
        if hash_file(partial_file, from_disk=True) != written.sha256:
            raise CheckpointError(f"{partial_file}: the disk gives back other bytes than were written; check the disk")
    journal.shards[shard.name] = ShardRecord(written.nbytes, written.sha256)
    journal.write(out)


def _report_checked(progress: Progress, on_progress: Callable[[Progress], None], name: str) -> None:
    progress.activity = f"checked {name}"
    on_progress(progress)


def _check_space(out: Path, plan: ConversionPlan, journal: Journal, transfer_bytes: int) -> None:
    free_bytes = machine.disk_free_bytes(out)
    if free_bytes < _left_bytes(plan, journal) + transfer_bytes + _SPARE_BYTES:
        raise _disk_full(out, plan, journal, free_bytes, transfer_bytes)


def _left_bytes(plan: ConversionPlan, journal: Journal) -> int:
    return sum(shard.nbytes for shard in plan.shards if shard.name not in journal.shards)


def _disk_full(
    out: Path, plan: ConversionPlan, journal: Journal, free_bytes: int, transfer_bytes: int = 0
) -> CapacityError:
    left_bytes = _left_bytes(plan, journal)
    needed_bytes = left_bytes + transfer_bytes + _SPARE_BYTES
    num_left = sum(shard.name not in journal.shards for shard in plan.shards)
    transfer = f", {format_bytes(transfer_bytes)} for what is being fetched" if transfer_bytes else ""
    return CapacityError(
        f"{out}: {needed_bytes} bytes needed on its disk ({format_bytes(left_bytes)} for {num_left} of "
        f"{len(plan.shards)} shards{transfer}), {free_bytes} free; make room for {needed_bytes - free_bytes} more and "
        "run the same command again, finished shards stay"
    )


@contextmanager
def _disk_full_as_capacity_error(out: Path, plan: ConversionPlan, journal: Journal) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{out}: cannot be written ({error.strerror}); check the disk") from error
        raise _disk_full(out, plan, journal, machine.disk_free_bytes(out)) from None
