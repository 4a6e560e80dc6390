"""The bench command: what this machine can do. Nothing heavy is imported before one runs."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from glm_gpu import options as opt
from glm_gpu import report

bench = typer.Typer(help="Measure this machine.", rich_markup_mode=None)

Model = Annotated[Path | None, opt.option("--model", "Model folder; default: the bundled demo model.", metavar="DIR")]
Seconds = Annotated[float, opt.option("--seconds", "Time of each of a row's three rounds.", min=0.01, metavar="S")]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    bench.command(epilog="Example: glm-gpu bench io --model ~/models/glm-5.2-int4")(io)
    app.add_typer(bench, name="bench")


def io(model: Model = None, seconds: Seconds = 1.0, as_json: opt.Json = False) -> None:
    """Read experts at random, through the page cache and past it, 1 to 16 at once.

    A buffered figure is the disk's only if the kernel had dropped the pages, which is looked up and said.
    """
    from glm_gpu.checkpoint import Checkpoint
    from glm_gpu.engine import DEMO_MODEL
    from glm_gpu.errors import RequestError
    from glm_gpu.recipe import Recipe
    from glm_gpu.tiers.files import ExpertFiles
    from glm_gpu.tiers.read_bench import measure_reads

    with Checkpoint.open(model or DEMO_MODEL) as checkpoint:
        files = ExpertFiles(checkpoint, Recipe.default(), list(checkpoint.config.sparse_layers))
        runs = [files.run(layer, expert) for layer in files.layers for expert in range(files.num_experts)]
        if None in runs:
            raise RequestError(f"{checkpoint.path} does not store its experts as runs; convert it with glm-gpu convert")
        rows = measure_reads(runs, seconds)
    documents = [dataclasses.asdict(row) | {"is_disk": row.is_disk, "expert_bytes": runs[0].nbytes} for row in rows]
    if as_json:
        report.document(documents)
        return
    report.result(f"experts of {runs[0].nbytes / 1e6:.2f} MB, {len(runs)} of them; median of three (lowest, highest)")
    for row in rows:
        if row.refused:
            report.result(f"{row.mode:8} {row.depth:2} in flight   refused by the file system: {row.refused}")
            continue
        meaning = "disk" if row.is_disk else f"page cache ({row.cached_share:.0%} of the pages were in memory)"
        rate = f"{row.gb_s:6.2f} GB/s ({row.low:.2f}, {row.high:.2f})"
        report.result(f"{row.mode:8} {row.depth:2} in flight   {rate}   {meaning}")
