"""The commands around containers: convert, inspect, verify. Nothing heavy is imported before one runs."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from glm_gpu import options as opt
from glm_gpu import report, report_convert

if TYPE_CHECKING:
    from glm_gpu.convert.convert import Progress

Threads = Annotated[
    int | None, opt.option("--threads", "CPU threads; default: the physical cores.", min=1, max=256, metavar="N")
]
Folder = Annotated[Path, typer.Argument(help="Container or checkpoint.", metavar="DIR")]
# a line for each shard, but not more often than this on small models
_SECONDS_BETWEEN_LINES = 2.0


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(epilog="Example: glm-gpu convert zai-org/GLM-5.2-FP8 --out ~/models/glm-5.2-int4")(convert)
    app.command(epilog="Example: glm-gpu inspect ~/models/glm-5.2-int4")(inspect)
    app.command(epilog="Example: glm-gpu verify ~/models/glm-5.2-int4")(verify)


def convert(
    source: Annotated[
        str, typer.Argument(help="Folder of an FP8 or BF16 checkpoint, or a hub repository.", metavar="SOURCE")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the container.", metavar="DIR", show_default=False)],
    revision: Annotated[
        str | None, opt.option("--revision", "Branch, tag or commit of a hub repository.", metavar="REV")
    ] = None,
    expert_bits: Annotated[
        Literal["16", "8", "4", "2"], opt.option("--expert-bits", "Bits of the routed experts.")
    ] = "4",
    dense_bits: Annotated[
        Literal["16", "8", "4", "2"],
        opt.option("--dense-bits", "Bits of attention, dense and shared-expert weights."),
    ] = "4",
    group: Annotated[
        Literal["0", "64", "128"], opt.option("--group", "Weights that share a scale at 4 bits; 0: a whole row.")
    ] = "64",
    scales: Annotated[Literal["f32", "f16"], opt.option("--scales", "Type of the scales.")] = "f32",
    rounding: Annotated[
        Literal["rtn", "search"], opt.option("--rounding", "To nearest, or with the scale of least error.")
    ] = "search",
    container: Annotated[
        Literal["glm-gpu", "colibri"], opt.option("--format", "Container to write; colibri's has no manifest.")
    ] = "glm-gpu",
    shard_size: Annotated[
        str, opt.option("--shard-size", "Most bytes of an output shard, as in 4GiB.", metavar="SIZE")
    ] = "4GiB",
    threads: Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Quantize a checkpoint into a container.

    One shard at a time; interrupted at any moment, the same command goes on where it was. A hub
    repository is fetched a shard at a time, too, and each shard is removed once it is converted.
    """
    from glm_gpu.convert.convert import convert as convert_source
    from glm_gpu.convert.journal import Journal
    from glm_gpu.convert.settings import ConvertSettings
    from glm_gpu.convert.source import open_source
    from glm_gpu.units import parse_bytes

    settings = ConvertSettings(
        int(expert_bits), int(dense_bits), int(group), scales, rounding, container, parse_bytes(shard_size)
    )
    begun = Journal.read(out)
    if revision is None and begun is not None:
        revision = begun.revision if not Path(source).is_dir() else None
    began = time.perf_counter()
    with open_source(source, revision, out / "download") as opened:
        report.note(f"{opened.name}: {len(opened.tensors)} tensors in {len(opened.shard_names)} shards")
        found = convert_source(opened, out, settings, threads, _ProgressLines())
    seconds = time.perf_counter() - began
    if as_json:
        report.document(report_convert.convert_document(found, out, seconds))
    else:
        report.result(report_convert.convert_text(found, out, seconds))
    for name in found.missing_files:
        report.note(f"{name}: the source has none{report_convert.MISSING_FILES.get(name, '')}")


def inspect(folder: Folder, as_json: opt.Json = False) -> None:
    """Show what a container or checkpoint holds.

    Weights and bytes by class and width, an expert's shapes, and its first numbers decoded.
    """
    from glm_gpu.checkpoint import Checkpoint
    from glm_gpu.convert.census import census, expert_sample
    from glm_gpu.convert.verify import refuse_unfinished

    refuse_unfinished(folder)
    with Checkpoint.open(folder) as checkpoint:
        rows, expert = census(checkpoint), expert_sample(checkpoint)
        if as_json:
            report.document(report_convert.inspect_document(checkpoint, rows, expert))
        else:
            report.result(report_convert.inspect_text(checkpoint, rows, expert))


def verify(folder: Folder, threads: Threads = None, as_json: opt.Json = False) -> None:
    """Prove that a container is whole.

    Headers, manifest, every tensor the model needs, and the SHA-256 of every shard. Exit code 1
    when something is wrong.
    """
    from glm_gpu.convert.verify import verify as verify_folder

    found = verify_folder(folder, threads, lambda name: report.note(f"read {name}"))
    if as_json:
        report.document(report_convert.verify_document(found, folder))
    else:
        report.result(report_convert.verify_text(found, folder))
    for problem in found.problems:
        report.error(problem)
    if found.problems:
        raise typer.Exit(1)


class _ProgressLines:
    """Prints how far a conversion is, a line now and then."""

    def __init__(self) -> None:
        self._began = self._printed = time.perf_counter()

    def __call__(self, progress: "Progress") -> None:
        now = time.perf_counter()
        if now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            report.note(report_convert.progress_line(progress, now - self._began))
