"""Published measurements of other engines against what the cost model says of their machines.

    python bench/published.py

`tests/data/published` has the measurements, their sources, and what is assumed. One JSON file in bench/results.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np

from glm_gpu.predict.cost import HOST, PlaceRates, Rates, passes_cost
from glm_gpu.predict.parts import Parts
from glm_gpu.predict.prediction import visits_of
from glm_gpu.predict.routing import Router, learned_heat, published_profile, routings
from glm_gpu.tiers.placement import hottest_first
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.replay import LeastRecentlyUsed, replay
from glm_gpu.tiers.trace import Trace, TraceHeader

DATA = Path(__file__).resolve().parent.parent / "tests/data/published/measurements.json"
# Of a memory's peak, and of what two sockets reach, see the data's README.
READ_SHARE, UNPLACED_SHARE = 0.79, 0.56
PROMPT, ANSWER = 32, 64
WITHIN = 0.25


def load() -> dict:
    return json.loads(DATA.read_text(encoding="utf-8"))


def parts_of(model: dict, expert_bits: float, other_bits: float) -> Parts:
    """A model's parts from counts of weights and bits a weight, scales included."""
    is_dense = np.arange(model["layers"]) < model["dense_layers"]
    attention = np.full(model["layers"], model["attention"])
    mlp = np.where(is_dense, model["dense_mlp"], model["shared"])
    slab = np.where(is_dense, 0, model["expert"] * expert_bits / 8).astype(int)
    other = other_bits / 8
    head = model["head"]
    return Parts(
        attention * other, attention, mlp * other, mlp, slab, model["expert"], int(head * other), head, 0, 1,
        model["experts_per_tok"],
    )  # fmt: skip


def rates_of(row: dict, engine: dict) -> Rates:
    share = engine["share"]
    memory = row["memory_gb_s"] * READ_SHARE * (UNPLACED_SHARE if row.get("sockets", 1) == 2 else 1) * share
    gpus = (PlaceRates(row["gpu_gb_s"] * share),) if "gpu_gb_s" in row else ()
    disk_gb_s, copies = row.get("disk_gb_s", np.inf), (np.inf,) * len(gpus)
    return Rates(PlaceRates(memory), disk_gb_s, 0.0, gpus, copies, True, engine["are_reads_hidden"])


@cache
def hits(lru_gb: float, pinned_gb: float, slab_bytes: int, num_layers: int, num_sparse: int) -> tuple[float, ...]:
    """Missing experts of each visit of a layer while decoding, simulated, and the share that was there."""
    layers = list(range(num_layers - num_sparse, num_layers))
    router = Router(published_profile(), (num_sparse, 256), 8, seed=0)
    heat = learned_heat(router, layers, num_layers, 256)
    values = worth(heat).ravel()
    pinned = np.zeros((num_layers, 256), bool)
    order = hottest_first(np.arange(values.size), values, 256)
    pinned.ravel()[order[: int(pinned_gb * 1e9 / slab_bytes)]] = True
    header = TraceHeader("", num_layers, 256, 8, (0,) * layers[0] + (slab_bytes,) * num_sparse)
    found = routings(router.draw(PROMPT), layers, "prefill", PROMPT)
    found += routings(router.draw(ANSWER), layers, "decode", 1)
    result = replay(Trace(header, found, False), LeastRecentlyUsed(header), int(lru_gb * 1e9), None, pinned)
    return tuple(m for m, routing in zip(result.num_missed, found, strict=True) if routing.phase == "decode")


def predicted(row: dict, data: dict) -> tuple[float, float]:
    """(tok/s, share of experts that came from memory) of a published row's machine."""
    model = data["models"][row["model"]]
    parts = parts_of(model, row["expert_bits"], row["other_bits"])
    num_layers, num_sparse, k = model["layers"], model["layers"] - model["dense_layers"], model["experts_per_tok"]
    if "lru_gb" in row:
        slab_bytes = int(parts.slab_bytes[-1])
        missing = np.array(hits(row["lru_gb"], row["pinned_gb"], slab_bytes, num_layers, num_sparse), float)
    else:
        missing = np.full(num_sparse, k * (1 - row.get("hit_rate", 1.0)))
    num_tokens = len(missing) // num_sparse
    table = np.zeros((num_tokens, num_layers, 3))  # experts in VRAM, in RAM, on disk
    table[:, num_layers - num_sparse :, 2] = missing.reshape(num_tokens, num_sparse)
    table[:, num_layers - num_sparse :, 1] = k - table[:, num_layers - num_sparse :, 2]
    on_gpu = slice(num_layers - num_sparse, num_layers - num_sparse + row.get("gpu_expert_layers", 0))
    table[:, on_gpu, 0], table[:, on_gpu, 1] = table[:, on_gpu, 1].copy(), 0
    places = np.full(num_layers, 0 if row.get("dense_on_gpu") else HOST)
    visits = visits_of(table)
    cost = passes_cost(parts, rates_of(row, data["engines"][row["engine"]]), places, visits, 0.0, num_tokens)
    return num_tokens / cost.seconds, 1 - missing.sum() / (num_tokens * num_sparse * k)


def main() -> None:
    import record

    data, rows = load(), []
    for row in data["rows"]:
        tok_s, hit_rate = predicted(row, data)
        off = tok_s / row["tok_s"] - 1
        kind = "calibration" if row.get("calibration") else "misses" if "misses" in row else "counted"
        found = {"published_tok_s": row["tok_s"], "predicted_tok_s": tok_s, "off": off, "hit_rate": hit_rate}
        rows.append({name: row[name] for name in ("name", "engine", "model", "source")} | found | {"kind": kind})
        speeds = f"{row['tok_s']:7.2f} published {tok_s:7.2f} predicted {off:+5.0%}"
        print(f"{row['engine']:14}{row['name']:42}{speeds}  {kind}")
    counted = [row for row in rows if row["kind"] == "counted"]
    print(f"{sum(abs(row['off']) <= WITHIN for row in counted)} of {len(counted)} counted rows within {WITHIN:.0%}")
    record.save("published", {"within": WITHIN, "engines": data["engines"], "rows": rows})


if __name__ == "__main__":
    main()
