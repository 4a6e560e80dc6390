"""Perplexity of the demo model on the held-out texts, as bundled, and with the BF16 weights that it was made from.

    python bench/quality.py MODEL_DIR      the BF16 checkpoint that tools/train_demo.py writes

The model learned on pieces of 256 tokens and is read in windows of that length.
"""

import argparse
from pathlib import Path

import record

from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.evaluate import heldout_texts
from glm_gpu.opening import EngineOptions
from glm_gpu.score import score

CONTEXT = 258


def perplexities(model: Path, bits: int | None) -> dict[str, float]:
    """Of each held-out text, for each token."""
    with Engine.open(model, EngineOptions(context=CONTEXT, expert_bits=bits, dense_bits=bits)) as engine:
        return {name: score(engine, engine.tokenizer.encode(text)).perplexity for name, text in heldout_texts().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    found = {"bf16": perplexities(parser.parse_args().model_dir, 16), "bundled": perplexities(DEMO_MODEL, None)}
    for name, value in found["bundled"].items():
        print(f"{name:<12} {found['bf16'][name]:7.2f} {value:7.2f}   {value / found['bf16'][name] - 1:+.1%}")
    print(record.save("quality", {"perplexity": found}))


if __name__ == "__main__":
    main()
