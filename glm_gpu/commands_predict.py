"""The simulate command: what a described machine would do. Nothing heavy is imported before it runs."""

from typing import Annotated

import typer

from glm_gpu import options as opt
from glm_gpu import report
from glm_gpu.units import parse_bytes

MachineName = Annotated[
    str | None,
    typer.Option("--machine", help="A shipped machine, or a .toml or .json file; default: all shipped ones.",
                 metavar="NAME|FILE"),
]  # fmt: skip
Ram = Annotated[
    str | None, opt.option("--ram", "Most memory to use, as in 20GiB; default: what is available.", metavar="SIZE")
]
Context = Annotated[
    int | None,
    opt.option("--context", "Tokens a conversation may hold; default: up to 8192.", min=2, metavar="N"),
]
Prompt = Annotated[int, typer.Option("--prompt", help="Tokens of the prompt.", min=1, max=65536, metavar="N")]
Answer = Annotated[int, typer.Option("--tokens", help="Tokens of the answer.", min=1, max=4096, metavar="N")]
Seed = Annotated[int, typer.Option("--seed", help="Draws the routing; the same seed draws the same.", min=0)]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(epilog="Example: glm-gpu simulate --machine desktop-64gb-24gb-card --ram 48GiB")(simulate)


def simulate(
    machine: MachineName = None,
    ram: Ram = None,
    context: Context = None,
    prompt: Prompt = 512,
    tokens: Answer = 64,
    seed: Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Predict how fast GLM-5.2 is on a machine that nobody has to own.

    Routes a conversation as skewed and repetitive as GLM-5.2's was measured to be through the planner and the store's
    policy, and adds up what reading, copying and computing take. Needs no weights. glm_gpu/predict/machines.py says
    what a machine's file holds.
    """
    from glm_gpu.opening import EngineOptions
    from glm_gpu.predict.machines import open_machine, shipped_machines
    from glm_gpu.predict.prediction import Workload
    from glm_gpu.predict.simulation import simulate as run
    from glm_gpu.report_predict import simulation_document, simulation_text

    machines = [open_machine(name) for name in ([machine] if machine else shipped_machines())]
    options = EngineOptions(context=context, ram=None if ram is None else parse_bytes(ram))
    documents = []
    for found in machines:
        simulated = run(found, options, Workload(prompt, tokens, seed))
        documents.append(simulation_document(found, simulated))
        if not as_json:
            report.result(simulation_text(found, simulated))
            if found is not machines[-1]:
                report.result("")
    if as_json:
        report.document(documents[0] if machine else documents)
