"""The commands around placement: plan, status, replay. Nothing heavy is imported before one runs."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm_gpu import options as opt
from glm_gpu import report
from glm_gpu.errors import RequestError
from glm_gpu.units import parse_bytes

if TYPE_CHECKING:
    from glm_gpu.checkpoint import Checkpoint
    from glm_gpu.opening import EngineOptions
    from glm_gpu.predict.cost import Rates
    from glm_gpu.tiers.heat import Heat
    from glm_gpu.tiers.trace import TraceHeader

# Shares of all experts that a replay tries when no amount of memory is given.
_REPLAY_SHARES = (0.10, 0.25, 0.50)

Trace = Annotated[Path, typer.Argument(help="File that --trace wrote.", metavar="FILE")]
ReplayRam = Annotated[
    str | None, opt.option("--ram", "Memory for experts; default: a tenth, a quarter, half of all.", metavar="SIZE")
]
Slots = Annotated[
    int | None, opt.option("--expert-slots", "Memory for so many experts, in place of --ram.", min=1, metavar="N")
]
HeatFrom = Annotated[
    list[Path] | None,
    typer.Option("--heat-from", help="Trace of an earlier run, for heat; may repeat.", metavar="FILE"),
]
HeatKept = Annotated[
    Path | None, typer.Option("--heat", help="Heat file of the state folder, in place of --heat-from.", metavar="FILE")
]
Measure = Annotated[bool, typer.Option("--measure", help="Measure memory and disk now, in a few seconds.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show running engines until Ctrl-C.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(epilog="Example: glm-gpu plan --model ~/models/GLM-5.2 --ram 64GiB")(plan)
    app.command(epilog="Example: glm-gpu status --model ~/models/GLM-5.2 --ram 64GiB")(status)
    app.command(epilog="Example: glm-gpu replay chat.trace --ram 32GiB --heat-from yesterday.trace")(replay)


@opt.expand_options
def plan(model: opt.ModelOptions, measure: Measure = False, as_json: opt.Json = False) -> None:
    """Show where every expert would live, and how fast that would be.

    Loads nothing. The prediction needs rates of kernels and disk; --measure takes them now and keeps them for later
    plans. It routes a prompt of 512 tokens and an answer by the heat of earlier runs, or else as GLM-5.2's routing was
    published to be.
    """
    from glm_gpu import report_tiers
    from glm_gpu.checkpoint import Checkpoint
    from glm_gpu.engine import DEMO_MODEL
    from glm_gpu.opening import plan_opening
    from glm_gpu.predict.measure import load_rates
    from glm_gpu.predict.parts import model_parts
    from glm_gpu.predict.prediction import Workload, draw_conversation, predict
    from glm_gpu.tiers.heat_file import HeatFile

    options, folder = model.engine_options(), opt.state_folder()
    with Checkpoint.open(model.model or DEMO_MODEL) as checkpoint:
        config = checkpoint.config
        heat_file = HeatFile(folder, checkpoint.fingerprint, is_read_only=True)
        heat = heat_file.load(config.num_hidden_layers + 1, config.n_routed_experts)
        opening = plan_opening(checkpoint, options, heat)
        rates = _measure(checkpoint, options, folder) if measure else load_rates(folder)
        parts = model_parts(config, options.recipe, checkpoint)
    prediction = None
    if rates is not None and not opening.plan.devices:
        conversation = draw_conversation(opening.sizes, parts.num_layers, Workload(), heat)
        prediction = predict(parts, opening.sizes, opening.plan, rates, conversation)
    if as_json:
        report.document(report_tiers.plan_document(opening.plan, opening.sizes, prediction, heat))
        return
    report.result(report_tiers.plan_text(opening.plan, opening.sizes, prediction, heat))
    if rates is None and not opening.plan.devices:
        report.note("no speed without measured rates; --measure takes them")
    elif opening.plan.devices:
        report.note("no speed of GPUs, whose rates are not measured; glm-gpu simulate tells that of described ones")


@opt.expand_options
def status(model: opt.ModelOptions, watch: Watch = False, as_json: opt.Json = False) -> None:
    """Show the model, this machine, and running engines.

    Loads nothing; exit code 1 when the model cannot run here and no engine runs it.
    """
    from glm_gpu import report_tiers
    from glm_gpu.status import status as look
    from glm_gpu.tiers.live import INTERVAL_S, live_engines

    if watch and as_json:
        raise RequestError("give either --watch or --json, not both")
    found = look(model.model, model.engine_options())
    fingerprint = found.model and found.model.fingerprint
    engines = live_engines(opt.state_folder(), fingerprint)
    if as_json:
        report.document(report.status_document(found) | {"engines": engines})
    elif watch:
        while True:
            text = "\n\n".join(map(report_tiers.live_text, live_engines(opt.state_folder(), fingerprint)))
            report.screen(text or "no engine runs this model")
            time.sleep(INTERVAL_S)
    else:
        report.result("\n\n".join([report.status_text(found), *map(report_tiers.live_text, engines)]))
    if found.problem and not engines:
        raise typer.Exit(1)


def replay(
    trace: Trace,
    ram: ReplayRam = None,
    expert_slots: Slots = None,
    heat_from: HeatFrom = None,
    heat: HeatKept = None,
    as_json: opt.Json = False,
) -> None:
    """Compare policies and memory sizes on a recorded run.

    Tells what the shipped policy, plain LRU and LFU, static heat where some is given, and the optimum that knows the
    future would have hit and read. Memory begins empty.
    """
    from glm_gpu import report_tiers
    from glm_gpu.tiers.replay import compare
    from glm_gpu.tiers.trace import read_trace

    recorded = read_trace(trace)
    header = recorded.header
    total_bytes, largest = sum(header.slab_nbytes) * header.num_experts, max(header.slab_nbytes)
    known = _known_heat(header, heat_from or [], heat)
    results = []
    for capacity in _capacities(ram, expert_slots, total_bytes, largest):
        results += compare(recorded, capacity, known)
    if as_json:
        report.document(report_tiers.replay_document(results, total_bytes))
    else:
        report.result(report_tiers.replay_text(results, total_bytes))


def _known_heat(header: "TraceHeader", traces: list[Path], heat: Path | None) -> "Heat | None":
    """What earlier runs left, from their traces or from a heat file; None without either."""
    from glm_gpu.tiers.heat_file import read_heat
    from glm_gpu.tiers.replay import learned
    from glm_gpu.tiers.trace import read_trace

    if traces and heat is not None:
        raise RequestError("give either --heat or --heat-from, not both")
    if heat is not None:
        known = read_heat(heat, header.fingerprint, header.num_layers, header.num_experts)
        if known is None:
            raise RequestError(f"{heat}: no heat of model {header.fingerprint}; give a file of the state folder")
        return known
    earlier = [read_trace(path) for path in traces]
    if any(other.header.fingerprint != header.fingerprint for other in earlier):
        raise RequestError(f"--heat-from holds the trace of another model, expected {header.fingerprint}")
    return learned(earlier) if earlier else None


def _capacities(ram: str | None, expert_slots: int | None, total_bytes: int, largest: int) -> list[int]:
    if ram is not None and expert_slots is not None:
        raise RequestError("give either --ram or --expert-slots, not both")
    if ram is None:
        slots = [expert_slots * largest] if expert_slots else [int(share * total_bytes) for share in _REPLAY_SHARES]
        return [max(largest, capacity) for capacity in slots]
    if (capacity := parse_bytes(ram)) < largest:
        raise RequestError(f"--ram {ram} does not hold a single expert of {largest} bytes; give more")
    return [capacity]


def _measure(checkpoint: "Checkpoint", options: "EngineOptions", folder: Path | None) -> "Rates":
    """Rates of this machine, kept for later where that is possible."""
    from glm_gpu.kernels import cpu
    from glm_gpu.predict.cost import Rates
    from glm_gpu.predict.measure import disk_rates, measure_host, save_rates
    from glm_gpu.tiers.files import ExpertFiles
    from glm_gpu.tiers.read_bench import measure_reads

    files = ExpertFiles(checkpoint, options.recipe, list(checkpoint.config.sparse_layers))
    runs = [files.run(layer, expert) for layer in files.layers for expert in range(files.num_experts)]
    if None in runs:
        raise RequestError(f"{checkpoint.path} does not store its experts as runs; convert it with glm-gpu convert")
    layout = files.layout(files.layers[0])
    disk = disk_rates(measure_reads(runs, seconds=0.1), layout.nbytes)
    if disk is None:
        raise RequestError(f"{checkpoint.path}: all of it is in the page cache; the disk cannot be measured")
    if options.threads is not None:
        cpu.set_threads(options.threads)
    rates = Rates(measure_host(layout, options.activations), *disk)
    if folder is not None:
        try:
            save_rates(folder, rates)
        except OSError as error:
            report.note(f"{folder}: rates are not kept ({error.strerror})")
    return rates
