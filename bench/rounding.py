"""Compare the two roundings: held-out perplexity of the demo model, and logit error on the reference fixture.

    python bench/rounding.py MODEL_DIR [--widths 4/4/64 2/2/0 ...]

MODEL_DIR is the BF16 checkpoint of the demo model (from tools/train_demo.py). Both checkpoints are converted twice into
a temporary folder. Prints a table and the default that the figures speak for; kept in
bench/results/rounding.json.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import record

from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.engine import Engine
from glm_gpu.evaluate import differences, evaluate, heldout_texts
from glm_gpu.kernels import cpu
from glm_gpu.machine import cpu_name
from glm_gpu.opening import EngineOptions
from glm_gpu.recipe import DEFAULT_ROUNDING

ORACLE = Path(__file__).resolve().parent.parent / "tests/data/oracle/tiny_glm"
ROUNDINGS = ("rtn", "search")


def container(source_dir: Path, out: Path, widths: tuple[int, int, int], rounding: str) -> Path:
    """A container of those widths, written anew."""
    with LocalSource(source_dir) as source:
        convert(source, out, ConvertSettings(*widths, rounding=rounding))
    return out


def logit_error(model_dir: Path) -> dict:
    """Over the reference's 64 prompt positions: root mean square logit error, and share of equal likeliest tokens."""
    reference = np.load(ORACLE / "reference.npz")
    with Engine.open(model_dir, EngineOptions(activations="f32", kv="f32")) as engine:
        logits = np.concatenate(list(engine.logits(reference["input_ids"].tolist())))
    expected = reference["logits"]
    return {
        "logit_rmse": float(np.sqrt(np.mean((logits - expected) ** 2))),
        "top1": float(np.mean(logits.argmax(1) == expected.argmax(1))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--widths", nargs="+", default=["4/4/64", "4/4/0", "2/2/0"], help="expert/dense bits/group")
    arguments = parser.parse_args()
    print(f"{cpu_name()}, {cpu.implementation()}")
    rows = []
    for text in arguments.widths:
        widths = tuple(int(part) for part in text.split("/"))
        measured = {}
        for rounding in ROUNDINGS:
            with tempfile.TemporaryDirectory() as folder:
                demo = container(arguments.model_dir, Path(folder) / "demo", widths, rounding)
                with Engine.open(demo) as engine:
                    measured[rounding] = evaluate(engine, heldout_texts(), [])
                errors = logit_error(container(ORACLE, Path(folder) / "oracle", widths, rounding))
            perplexity = measured[rounding].measures["perplexity"](np.arange(len(measured[rounding].nats)))
            rows.append({"widths": text, "rounding": rounding, "perplexity": perplexity, **errors})
            print(
                f"{text:<8} {rounding:<7} held-out perplexity {perplexity:.4f}   oracle logit RMSE "
                f"{errors['logit_rmse']:.4f}, top-1 {errors['top1']:.3f}",
                flush=True,
            )
        change = differences(measured["rtn"], measured["search"])["perplexity"]
        rows[-1]["perplexity_change"] = [change.value, change.low, change.high]
        print(f"{text:<8} search changes perplexity by {change.value:+.2%} [{change.low:+.2%}, {change.high:+.2%}]")
    print(f"default: {DEFAULT_ROUNDING}")
    print(record.save("rounding", {"rows": rows}))


if __name__ == "__main__":
    main()
