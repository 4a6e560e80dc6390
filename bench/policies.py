"""Hit rates of the shipped policy, plain policies and the optimum on recorded routing, for any heat and capacity.

For every trace of answers: heat from nothing, from the other kinds of text (held out, another topic), from another text
of the same kind (held out), and from the trace itself (in sample); 10, 25 and 50 % of all experts in memory.

    python bench/policies.py --traces tests/data/traces
"""

import argparse
from pathlib import Path

import record

from glm_gpu.tiers.replay import compare, learned
from glm_gpu.tiers.trace import Trace, read_trace

CAPACITIES = (0.10, 0.25, 0.50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, default=Path("tests/data/traces"))
    folder = parser.parse_args().traces
    kinds = sorted(path.name.split(".")[0] for path in folder.glob("*.answers.trace"))
    answers = {kind: read_trace(folder / f"{kind}.answers.trace") for kind in kinds}
    texts = {kind: read_trace(folder / f"{kind}.text.trace") for kind in kinds}
    rows = []
    for kind, trace in answers.items():
        sources = {
            "none": None,
            "other kinds": learned([texts[other] for other in kinds if other != kind]),
            "same kind": learned([texts[kind]]),
            "in sample": learned([trace]),
        }
        for share in CAPACITIES:
            for source, heat in sources.items():
                rows.append(row(kind, trace, share, source, heat))
                print(text(rows[-1]), flush=True)
    print(record.save("policies", {"rows": rows}))


def row(kind: str, trace: Trace, share: float, source: str, heat) -> dict:
    capacity = int(share * sum(trace.header.slab_nbytes) * trace.header.num_experts)
    results = compare(trace, capacity, heat)
    return {"trace": kind, "capacity": share, "heat": source, **{r.policy: r.hit_rate("decode") for r in results}}


def text(found: dict) -> str:
    rates = {name: rate for name, rate in found.items() if isinstance(rate, float) and name != "capacity"}
    best_other = max(rate for name, rate in rates.items() if name not in ("glm-gpu", "optimum"))
    cells = "  ".join(f"{name} {100 * rate:5.1f}" for name, rate in rates.items())
    lead = 100 * (rates["glm-gpu"] - best_other)
    gap = 100 * (rates["optimum"] - rates["glm-gpu"])
    where = f"{found['trace']:<10} {found['capacity']:4.0%} heat {found['heat']:<12}"
    return f"{where} {cells}  lead {lead:+.1f}  gap {gap:.1f}"


if __name__ == "__main__":
    main()
