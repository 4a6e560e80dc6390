"""What the commands around tiers print: plans, running engines, and replayed traces."""

import dataclasses
import time
from typing import Any

from glm_gpu.predict.prediction import Prediction
from glm_gpu.report import table
from glm_gpu.report_predict import prediction_document, prediction_rows
from glm_gpu.tiers.placement import expected_uses
from glm_gpu.tiers.plan import Plan
from glm_gpu.tiers.replay import ReplayResult
from glm_gpu.tiers.sizes import ModelSizes
from glm_gpu.tiers.tier_map import MapRow, map_rows, map_text
from glm_gpu.units import format_bytes


def plan_document(plan: Plan, sizes: ModelSizes, prediction: Prediction | None, heat: Any) -> dict:
    """What `plan --json` prints."""
    slots = [{"slot_bytes": size, "slots": n, "pinned": plan.num_pinned[size]} for size, n in plan.num_slots.items()]
    return {
        "budget": dataclasses.asdict(plan.budget),
        "ram_bytes": plan.ram_bytes,
        "parts": {
            "program_bytes": plan.base_bytes,
            "dense_bytes": plan.dense_bytes,
            "cache_bytes": plan.cache_bytes,
            "pass_bytes": plan.pass_bytes,
            "read_bytes": plan.read_bytes,
            "slot_bytes": plan.slot_bytes,
        },
        "context": plan.context,
        "is_streamed": plan.is_streamed,
        "read_mode": plan.read_mode,
        "lock_bytes": plan.lock_bytes,
        "slots": slots,
        "tiers": [dataclasses.asdict(tier) for tier in plan.tiers],
        "devices": [dataclasses.asdict(device) for device in plan.devices],
        "reasons": list(plan.reasons),
        "prediction": prediction and prediction_document(prediction),
        "map": [dataclasses.asdict(row) for row in _planned_map(plan, sizes, heat)],
    }


def plan_text(plan: Plan, sizes: ModelSizes, prediction: Prediction | None, heat: Any) -> str:
    """What `plan` prints."""
    parts = [
        ("program", plan.base_bytes),
        ("weights, streamed" if plan.is_streamed else "weights", plan.dense_bytes),
        (f"cache of {plan.context} tokens", plan.cache_bytes),
        ("largest pass", plan.pass_bytes),
        ("readers", plan.read_bytes),
        (f"{sum(plan.num_slots.values())} expert slots", plan.slot_bytes),
    ]
    rows = [("memory", f"{format_bytes(plan.budget.ram_bytes)} may be used ({plan.budget.reason})")]
    rows += [(f"  {name}", format_bytes(num_bytes)) for name, num_bytes in parts]
    rows.append(("  in all", format_bytes(plan.ram_bytes)))
    rows += [(f"tier {tier.name}", _tier(tier.num_experts, tier.nbytes, tier.heat_share)) for tier in plan.tiers]
    for device in plan.devices:
        layers = f"layers {device.layers[0]} to {device.layers[-1]}" if device.layers else "no layers"
        used = f"{format_bytes(device.used_bytes)} of {format_bytes(device.free_bytes)}"
        rows.append((device.name, f"{layers}, {device.num_experts} experts, {used}"))
    if prediction is not None:
        rows += prediction_rows(prediction)
    rows += [("because", reason) for reason in plan.reasons]
    return table(rows) + "\n\n" + map_text(_planned_map(plan, sizes, heat), sizes.num_experts)


def live_text(document: dict) -> str:
    """One running engine, from what it published."""
    age = max(0.0, time.time() - document["at"])
    rates = document["tok_s"]
    rows = [
        ("engine", f"process {document['pid']}, {document['model']}, {age:.0f} s ago"),
        ("tokens", ", ".join(f"{phase} {n} ({rates[phase]:.1f} tok/s)" for phase, n in document["tokens"].items())),
        ("disk", f"{format_bytes(document['read_bytes'])} read, {document['read_mb_s']:.0f} MB/s now"),
    ]
    for tier in document["tiers"]:
        capacity = f" of {format_bytes(tier['capacity_bytes'])}" if tier["name"] != "disk" else ""
        hits = ", ".join(f"{phase} {n}" for phase, n in tier["hits"].items())
        held = f"{tier['num_experts']} experts, {format_bytes(tier['used_bytes'])}{capacity}"
        rows.append((f"tier {tier['name']}", f"{held}, {tier['heat_share']:.0%} of uses, hits: {hits}"))
    rows += [(f"{phase}", _hit_rate(counts)) for phase, counts in document["counters"]["phases"].items()]
    cells = [MapRow(**row) for row in document["map"]]
    return table(rows) + "\n\n" + map_text(cells, document["num_experts"])


def replay_document(results: list[ReplayResult], total_bytes: int) -> list[dict]:
    """What `replay --json` prints."""
    return [
        {
            "policy": result.policy,
            "capacity_bytes": result.capacity_bytes,
            "capacity_share": result.capacity_bytes / total_bytes,
            "hits": result.hits,
            "uses": result.uses,
            "read_bytes": result.read_bytes,
            "hit_rate": result.hit_rate(),
            "hit_rate_by_phase": {phase: result.hit_rate(phase) for phase in result.uses},
        }
        for result in results
    ]


def replay_text(results: list[ReplayResult], total_bytes: int) -> str:
    """What `replay` prints: for each capacity the policies, and what each is short of the optimum."""
    lines = [f"{'memory for experts':<22}{'policy':<13}{'prefill':>8}{'decode':>8}{'read':>12}{'to optimum':>12}"]
    best = {result.capacity_bytes: result.hit_rate() for result in results}  # the optimum is the last of each
    for result in results:
        share = f"{format_bytes(result.capacity_bytes)} ({result.capacity_bytes / total_bytes:.0%})"
        gap = 100 * (best[result.capacity_bytes] - result.hit_rate())
        lines.append(
            f"{share:<22}{result.policy:<13}{result.hit_rate('prefill'):>8.1%}{result.hit_rate('decode'):>8.1%}"
            f"{format_bytes(sum(result.read_bytes.values())):>12}{gap:>9.1f} pt"
        )
    return "\n".join(lines)


def _planned_map(plan: Plan, sizes: ModelSizes, heat: Any) -> list[MapRow]:
    return map_rows(plan.placement, expected_uses(sizes, heat))


def _tier(num_experts: int, num_bytes: int, share: float) -> str:
    return f"{num_experts} experts, {format_bytes(num_bytes)}, {share:.0%} of uses"


def _hit_rate(counts: dict) -> str:
    hits, uses = counts["vram"] + counts["locked"] + counts["ram"], sum(counts.values())
    rate = f"{hits / uses:.1%}" if uses else "-"
    return (
        f"hit rate {rate}; {counts['prefetched']} read ahead in time, {counts['late']} late, {counts['missed']} missed"
    )
