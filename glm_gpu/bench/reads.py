"""`glm-gpu bench io`: experts read at random, through the page cache and past it, several at once."""

import dataclasses
from pathlib import Path

from glm_gpu.bench.measurement import Limit, Part
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.errors import RequestError
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.files import ExpertFiles, Run
from glm_gpu.tiers.read_bench import measure_reads


def expert_runs(path: Path) -> list[Run]:
    """Where each expert of a container lies.

    Raises:
        RequestError: they lie in pieces.
    """
    with Checkpoint.open(path) as checkpoint:
        files = ExpertFiles(checkpoint, Recipe.default(), list(checkpoint.config.sparse_layers))
        runs = [files.run(layer, expert) for layer in files.layers for expert in range(files.num_experts)]
    found = [run for run in runs if run]
    if len(found) < len(runs):
        raise RequestError(f"{path} does not store its experts as runs; convert it with glm-gpu convert")
    return found


def shard_bytes(path: Path) -> int:
    """Bytes of a model's shards."""
    return sum(shard.stat().st_size for shard in path.glob("*.safetensors"))


def measure_io(path: Path, seconds: float) -> Part:
    """Each mode at each depth, against the best that is the disk's.

    Args:
        seconds: of each of a row's rounds.

    Raises:
        RequestError: experts lie in pieces.
    """
    runs = expert_runs(path)
    part = Part("io", f"{path.name}: {len(runs)} experts of {runs[0].nbytes / 1e6:.2f} MB, read at random")
    found = measure_reads(runs, seconds)
    best = max((row.gb_s for row in found if row.is_disk), default=None)
    limit = None if best is None else Limit(best, "the best of these rows")
    for row in found:
        meaning = "disk" if row.is_disk else "page cache"
        more = dataclasses.asdict(row) | {"is_disk": row.is_disk, "expert_bytes": runs[0].nbytes}
        if row.refused:
            part.notes.append(f"{row.mode} reads are refused by the file system: {row.refused}")
            continue
        name = f"{meaning}: {row.mode}, {row.depth} in flight"
        part.add(name, row.rates, "GB/s", limit if row.is_disk else None, **more)
    if best is None:
        part.notes.append("no row is the disk's: every page was in memory, or the file system takes no direct reads")
    return part
