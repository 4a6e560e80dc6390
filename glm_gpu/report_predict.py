"""What predictions print."""

import dataclasses
from typing import Any

from glm_gpu.predict.cost import Cost
from glm_gpu.predict.machines import Machine
from glm_gpu.predict.prediction import Prediction
from glm_gpu.predict.simulation import Simulation
from glm_gpu.report import table
from glm_gpu.units import format_bytes

# A phase below this share of the time is left out of the text.
_LEAST_SHARE = 0.005


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """A prediction in `--json`."""
    return {
        "tok_s": prediction.tok_s,
        "first_token_s": prediction.first_token_s,
        "prompt_tokens": prediction.prompt_tokens,
        "hit_rate": prediction.hit_rate,
        "vram_rate": prediction.vram_rate,
        "decode": _cost_document(prediction.decode),
        "prefill": _cost_document(prediction.prefill),
    }


def prediction_rows(prediction: Prediction) -> list[tuple[str, str]]:
    """A prediction as rows of a table."""
    decode, prefill = prediction.decode, prediction.prefill
    where = f"{prediction.hit_rate:.0%} of experts from memory"
    if prediction.vram_rate:
        where += f", {prediction.vram_rate:.0%} from a device's"
    return [
        ("decode", f"{_rate(prediction.tok_s)} tok/s, bound by {decode.bottleneck}; {where}"),
        ("  a token", _phases(decode)),
        (
            "first token",
            f"{_seconds(prediction.first_token_s)} behind a prompt of {prediction.prompt_tokens}, "
            f"bound by {prefill.bottleneck}",
        ),
    ]


def simulation_document(machine: Machine, simulation: Simulation) -> dict[str, Any]:
    """What `simulate --json` prints of one machine."""
    return {
        "machine": dataclasses.asdict(machine),
        "ram_bytes": simulation.plan.ram_bytes,
        "is_streamed": simulation.plan.is_streamed,
        "tiers": [dataclasses.asdict(tier) for tier in simulation.plan.tiers],
        "prediction": prediction_document(simulation.prediction),
    }


def simulation_text(machine: Machine, simulation: Simulation) -> str:
    """What `simulate` prints of one machine."""
    plan = simulation.plan
    has = [f"{machine.cores} cores", f"{format_bytes(machine.ram_bytes)} at {machine.memory_gb_s:g} GB/s"]
    if machine.gpus:
        first, count = machine.gpus[0], len(machine.gpus)
        has.append(f"{count} x {format_bytes(first.vram_bytes)} at {first.memory_gb_s:g} GB/s")
    has.append(f"disk at {machine.disk_gb_s:g} GB/s")
    tiers = [f"{tier.name} {tier.num_experts}" for tier in plan.tiers]
    where = ("; dense weights are streamed" if plan.is_streamed else "") + f"; {format_bytes(plan.ram_bytes)} of RAM"
    rows = [(machine.name, ", ".join(has)), ("experts", ", ".join(tiers) + where)]
    return table(rows + prediction_rows(simulation.prediction))


def _cost_document(cost: Cost) -> dict[str, Any]:
    return {
        "seconds": cost.seconds,
        "bottleneck": cost.bottleneck,
        "phases_s": cost.phases,
        "limits_s": cost.limits,
    }


def _phases(cost: Cost) -> str:
    shown = sorted(cost.phases.items(), key=lambda item: -item[1])
    found = [f"{name} {_seconds(took)}" for name, took in shown if took > _LEAST_SHARE * cost.seconds]
    return ", ".join(found) or "nothing"


def _rate(tok_s: float) -> str:
    return f"{tok_s:.2f}" if tok_s < 10 else f"{tok_s:,.0f}"


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"
