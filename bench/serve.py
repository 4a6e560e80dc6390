"""The server under load, held against the bounds of this project: `glm-gpu bench serve` for a minute, on the demo.

    python bench/serve.py                       # 32 clients for 60 s, of whom one in five leaves
    python bench/serve.py --clients 8 --seconds 10 --model DIR

Eight clients must be 2.5 times as fast as one; no gap between the tokens of an answer may be longer than five median
ones while a prompt of 2,000 tokens is computed beside it, those apart in which the hypervisor of a virtual machine kept
a processor to itself; every answer must be the one given alone; and afterwards nothing may run, wait, or hold a page
that no later prompt could use. Results go to bench/results/serve.json; exit code
1 where a bound is missed.
"""

import argparse
import sys
from pathlib import Path

import record

from glm_gpu.bench.serve import measure_serve
from glm_gpu.engine import DEMO_MODEL

MIN_GAIN, MAX_STALL = 2.5, 5.0


def missed(rows: list[dict]) -> list[str]:
    """The bounds that were not kept.

    Args:
        rows: the JSON of `measure_serve`.
    """
    _, eight, _, gap, load = rows
    gain, stall = eight["gain"], gap["median"] / gap["median_gap_ms"]
    requests, cache, before, after = (load[name] for name in ("requests", "cache", "before", "after"))
    bounds = {
        f"eight clients are {gain:.2f} times as fast as one, expected {MIN_GAIN}": gain >= MIN_GAIN,
        f"a gap of {stall:.1f} median ones, expected at most {MAX_STALL}": stall <= MAX_STALL,
        f"{load['differed']} answers differ from those given alone": load["differed"] == 0,
        "requests are left over": requests["running"] + requests["queued"] == 0,
        "pages are left over": cache["taken_pages"] == cache["remembered_pages"],
        # The pool that renders prompts comes to four.
        "threads are left over": not after or after["threads"] <= before["threads"] + 4,
    }
    return [bound for bound, is_kept in bounds.items() if not is_kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    arguments = parser.parse_args()
    part = measure_serve(arguments.model, None, arguments.clients, 4.0, arguments.seconds, 2000)
    found = part.document()
    for row in found["rows"]:
        print(row["name"])
        for name, value in row.items():
            if name != "name":
                print(f"  {name:26} {value}")
    bounds = missed(found["rows"])
    for line in bounds:
        print(f"missed: {line}")
    record.save("serve", {**found, "clients": arguments.clients, "seconds": arguments.seconds, "missed": bounds})
    return bool(bounds)


if __name__ == "__main__":
    sys.exit(main())
