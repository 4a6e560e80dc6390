"""The bench commands: what this machine can do. Nothing heavy is imported before one runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm_gpu import options as opt
from glm_gpu import report

if TYPE_CHECKING:
    from glm_gpu.bench.measurement import Part
    from glm_gpu.bench.slice import SliceShape

PARTS = ("io", "kernels", "decode", "prefill", "tiers", "serve")

bench = typer.Typer(rich_markup_mode=None)

Model = Annotated[
    Path | None,
    opt.option("--model", "Container to measure; default: a slice of GLM-5.2 with random weights.", metavar="DIR"),
]
Disk = Annotated[
    Path,
    typer.Option("--disk", help="Folder where that slice is written and removed again.", metavar="DIR"),
]
Threads = Annotated[
    int | None, opt.option("--threads", "CPU threads; default: the physical cores.", min=1, max=256, metavar="N")
]
Quick = Annotated[bool, typer.Option("--quick", help="A tenth of the time, on a smaller slice: for a first look.")]
Seconds = Annotated[float, opt.option("--seconds", "Time of each of a row's three rounds.", min=0.01, metavar="S")]
Clients = Annotated[int, typer.Option("--clients", help="Clients of the mixed load.", min=1, max=1024, metavar="N")]
Prompt = Annotated[
    int, typer.Option("--prompt", help="Tokens of the prompt beside a growing answer.", min=1, metavar="N")
]
HERE = Path()


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    example = "Example: glm-gpu bench {} --model ~/models/glm-5.2-int4"
    for command in (io, kernels, decode, prefill, tiers, serve):
        words = example if command is not kernels else "Example: glm-gpu bench {}"
        bench.command(epilog=words.format(command.__name__))(command)
    bench.callback(invoke_without_command=True, epilog="Example: glm-gpu bench --disk /mnt/models")(everything)
    app.add_typer(bench, name="bench")


def everything(
    context: typer.Context,
    model: Model = None,
    disk: Disk = HERE,
    threads: Threads = None,
    quick: Quick = False,
    as_json: opt.Json = False,
) -> None:
    """Measure what this machine does with GLM-5.2, before anything is downloaded.

    All parts, each in a process of its own, in about five minutes: reading experts, kernels, decode, prefill, the
    same with less and less memory, and the server. Each figure stands beside the limit that was measured with it;
    at the end comes what they predict for the whole model. The CPU computes, even where there are GPUs.
    """
    if context.invoked_subcommand is not None:
        return
    from glm_gpu import report_bench
    from glm_gpu.bench.process import own_document
    from glm_gpu.errors import DeviceError

    documents, failures = [], 0
    with _container(model, disk, quick) as path:
        for name in PARTS:
            words = [] if name == "kernels" else ["--model", str(path)]
            words += [] if threads is None or name == "io" else ["--threads", str(threads)]
            words += ["--quick"] if quick else []
            try:
                with report.progress(f"measuring {name}"):
                    documents.append(own_document("bench", name, "--json", *words))
            except DeviceError as error:
                failures += 1
                documents.append({"bench": name, "error": str(error)})
            if not as_json:
                found = documents[-1]
                report.result(f"{name}   {found['error']}" if "error" in found else report_bench.part_text(found))
                report.result("")
    whole = _whole_model(documents, as_json)
    if as_json:
        report.document({"parts": documents, "glm_5_2": whole})
    if failures:
        raise typer.Exit(1)


def _whole_model(documents: list[dict], as_json: bool) -> dict | None:
    """What the parts say about all of GLM-5.2, printed unless it is for JSON; None where they do not suffice."""
    from glm_gpu.bench.summary import measured_machine, whole_model
    from glm_gpu.errors import CapacityError
    from glm_gpu.report_predict import simulation_document, simulation_text

    machine = measured_machine(documents)
    if machine is None:
        report.note("no prediction for GLM-5.2: it needs rates of disk and memory")
        return None
    try:
        found = whole_model(machine)
    except CapacityError as error:
        report.note(f"GLM-5.2 does not run here: {error}")
        return None
    if not as_json:
        report.result("GLM-5.2, all of it, predicted from these rates\n" + simulation_text(machine, found))
    return simulation_document(machine, found)


def io(
    model: Model = None,
    disk: Disk = HERE,
    seconds: Seconds = 0.5,
    quick: Quick = False,
    as_json: opt.Json = False,
) -> None:
    """Read experts at random, through the page cache and past it, 1 to 16 at once.

    A buffered figure is the disk's only if the kernel had dropped the pages, which is looked up and said.
    """
    from glm_gpu.bench.reads import measure_io

    with _container(model, disk, quick) as path:
        _print(lambda: measure_io(path, seconds / 10 if quick else seconds), as_json)


def kernels(threads: Threads = None, quick: Quick = False, as_json: opt.Json = False) -> None:
    """Time every kernel at GLM-5.2's sizes.

    Against memory bandwidth, or the peak of the instruction that it rests on.
    """
    from glm_gpu.bench.kernels import measure_kernels

    _use(threads)
    _print(lambda: measure_kernels(quick), as_json)


def decode(
    model: Model = None,
    disk: Disk = HERE,
    threads: Threads = None,
    quick: Quick = False,
    as_json: opt.Json = False,
) -> None:
    """Decode from memory, with an empty context and a long one.

    Against the time that memory takes to deliver a token's weights.
    """
    from glm_gpu.bench.decode import measure_decode

    with _container(model, disk, quick) as path:
        _print(lambda: measure_decode(path, threads, quick), as_json)


def prefill(
    model: Model = None,
    disk: Disk = HERE,
    threads: Threads = None,
    quick: Quick = False,
    as_json: opt.Json = False,
) -> None:
    """Compute prompts of several lengths.

    Against the peak of the product instruction in use.
    """
    from glm_gpu.bench.decode import measure_prefill

    with _container(model, disk, quick) as path:
        _print(lambda: measure_prefill(path, threads, quick), as_json)


def tiers(
    model: Model = None,
    disk: Disk = HERE,
    threads: Threads = None,
    quick: Quick = False,
    as_json: opt.Json = False,
) -> None:
    """Decode with less and less memory for experts.

    Against the disk, measured beside each budget, and against the hit rate of a policy that knows the future.
    """
    from glm_gpu.bench.tiers import measure_tiers

    with _container(model, disk, quick) as path:
        _print(lambda: measure_tiers(path, threads, quick), as_json)


def serve(
    model: Model = None,
    disk: Disk = HERE,
    threads: Threads = None,
    clients: Clients = 16,
    seconds: Seconds = 4.0,
    prompt: Prompt = 64,
    quick: Quick = False,
    as_json: opt.Json = False,
) -> None:
    """Put a server under load.

    Throughput of one client and of eight, what a long prompt costs the others, and clients of all kinds at once.
    """
    from glm_gpu.bench.serve import measure_serve

    window_s, num_tokens = (seconds / 4, prompt // 8) if quick else (seconds, prompt)
    with _container(model, disk, quick) as path:
        _print(lambda: measure_serve(path, threads, clients, window_s, 3 * window_s, max(1, num_tokens)), as_json)


@contextmanager
def _container(model: Path | None, disk: Path, is_quick: bool) -> Iterator[Path]:
    """The model given, or a slice for as long as the `with` lasts."""
    if model is not None:
        yield model
        return
    from glm_gpu.bench.slice import temporary_slice

    with ExitStack() as stack:
        with report.progress("writing a slice of GLM-5.2"):
            path = stack.enter_context(temporary_slice(disk, _shape(is_quick)))
        yield path


def _shape(is_quick: bool) -> "SliceShape":
    """A slice that fits twice into memory: the server holds it beside what started it."""
    from glm_gpu.bench.slice import SliceShape
    from glm_gpu.machine import memory

    if is_quick:
        return SliceShape(num_layers=2, num_experts=16)
    shape = SliceShape()
    while shape.num_experts > 16 and 2 * shape.about_bytes > memory().available:
        shape = SliceShape(num_experts=shape.num_experts // 2)
    return shape


def _use(threads: int | None) -> None:
    if threads is not None:
        from glm_gpu.kernels import cpu

        cpu.set_threads(threads)


def _print(measure: "Callable[[], Part]", as_json: bool) -> None:
    from glm_gpu import report_bench

    with report.progress("measuring"):
        document = measure().document()
    report.document(document) if as_json else report.result(report_bench.part_text(document))
