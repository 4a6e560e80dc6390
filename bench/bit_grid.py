"""Which part of a model tolerates few bits: the same measures for every pair of widths, experts/dense.

On an oracle, against the reference's float32 logits: the share of positions whose best token stays the same, and the
median and greatest error of a logit. On the demo, the perplexity of texts it was not trained on. One JSON line a row
follows each table.

    python bench/bit_grid.py --demo DIR      DIR: the demo's BF16 checkpoint (tools/train_demo.py makes it)
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from glm_gpu.engine import Engine
from glm_gpu.opening import EngineOptions
from glm_gpu.score import score

WIDTHS = [(16, 16), (8, 8), (4, 8), (4, 4), (8, 4), (2, 2)]
# The demo was trained on 256 tokens at a time and knows nothing of positions beyond.
DEMO_CONTEXT = 257
DATA = Path(__file__).parent.parent / "tests/data"


def oracle_row(folder: Path, expert_bits: int, dense_bits: int) -> dict:
    """Logits of the reference's prompt against the reference's own."""
    with np.load(folder / "reference.npz") as arrays:
        ids, expected = arrays["input_ids"].tolist(), arrays["logits"]
    with Engine.open(folder, EngineOptions(expert_bits=expert_bits, dense_bits=dense_bits)) as engine:
        logits = np.concatenate(list(engine.logits(ids)))
    error = np.abs(logits - expected)
    return {
        "same_top1": float((logits.argmax(1) == expected.argmax(1)).mean()),
        "median_error": float(np.median(error)),
        "max_error": float(error.max()),
    }


def demo_row(folder: Path, texts: dict[str, str], expert_bits: int, dense_bits: int) -> dict:
    """Perplexity of each text, and their geometric mean."""
    options = EngineOptions(expert_bits=expert_bits, dense_bits=dense_bits, context=DEMO_CONTEXT)
    with Engine.open(folder, options) as engine:
        found = {name: score(engine, engine.tokenizer.encode(text)).perplexity for name, text in texts.items()}
    return found | {"mean": math.exp(sum(map(math.log, found.values())) / len(found))}


def print_table(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    print("experts/dense  " + "  ".join(f"{name:>12}" for name in rows[0] if name not in ("experts", "dense", "model")))
    for row in rows:
        values = [value for name, value in row.items() if name not in ("experts", "dense", "model")]
        print(f"{row['experts']:>7}/{row['dense']:<5}  " + "  ".join(f"{value:>12.4f}" for value in values))
    for row in rows:
        print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of every pair of expert and dense bits.")
    parser.add_argument("--demo", type=Path, help="the demo's BF16 checkpoint; without it only the oracle is measured")
    parser.add_argument("--oracle", type=Path, default=DATA / "oracle/tiny_glm")
    args = parser.parse_args()
    texts = {path.stem: path.read_text() for path in sorted((DATA / "demo").glob("*.txt"))}
    measures = {args.oracle: lambda e, d: oracle_row(args.oracle, e, d)}
    if args.demo:
        measures[args.demo] = lambda e, d: demo_row(args.demo, texts, e, d)
    for folder, measure in measures.items():
        rows = [{"model": folder.name, "experts": e, "dense": d} | measure(e, d) for e, d in WIDTHS]
        print_table(f"{folder}", rows)


if __name__ == "__main__":
    main()
