"""Measure everything that the README tells and write it there: JSON and plots in bench/results, tables in README.md.

    python bench/all.py --demo MODEL_DIR           all parts, on two cores in less than 30 minutes
    python bench/all.py --only decode tiers        some of them; the others keep their results
    python bench/all.py --quick --results /tmp/r   small sizes, to see that it works; README.md stays as it is

MODEL_DIR is the BF16 checkpoint that tools/train_demo.py writes; without it `quality` and `rounding` are left out.
What the parts need, 7 GB of a slice and 8 GB of a checkpoint, is written below --work and removed at the end. A part
that fails is named at the end and keeps its old results; so is `serve` when it misses a bound, with its new ones. Needs
`pip install '.[bench]'`.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import record

from glm_gpu.bench.process import own_document, own_environment
from glm_gpu.errors import GlmGpuError

BENCH = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """What is asked for, and where things lie."""

    work: Path
    given_slice: Path | None
    demo: Path | None
    is_quick: bool

    def script(self, name: str, *words: object) -> None:
        """Run a script of this folder; its output is shown.

        Raises:
            CalledProcessError: it failed.
        """
        command = [sys.executable, str(BENCH / name), *map(str, words)]
        subprocess.run(command, env=own_environment(BENCH_RESULTS=str(record.RESULTS)), check=True)

    def slice(self) -> Path:
        """The slice, written when it is first asked for."""
        if self.given_slice is not None:
            return self.given_slice
        path = self.work / "slice"
        if not (path / "glm_gpu.json").exists():  # which is written last
            shutil.rmtree(path, ignore_errors=True)
            layers, experts = (2, 16) if self.is_quick else (4, 96)
            self.script("make_slice.py", "--out", path, "--layers", layers, "--experts", experts)
        return path

    def clean(self) -> None:
        """Remove what was written below `work`, and nothing else that lies there."""
        for name in ("slice", "checkpoint", "converted"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # something else lies there
            self.work.rmdir()


def installed(name: str, takes_model: bool = True) -> Callable[[Run], None]:
    """A part that is one of `glm-gpu bench`."""

    def measure(run: Run) -> None:
        words = ["--model", str(run.slice())] if takes_model else []
        found = own_document("bench", name, "--json", *words, *(["--quick"] if run.is_quick else []))
        record.save(name, found, " ".join(["glm-gpu bench", name, *(["--model slice"] if takes_model else [])]))

    return measure


def serve(run: Run) -> None:
    run.script("serve.py", "--seconds", 3 if run.is_quick else 60)


def speculation(run: Run) -> None:
    for budget, num_prompts in (("resident", 48), ("half", 26), ("disk", 16)):
        run.script("speculation.py", "speed", "--budget", budget, "--prompts", 2 if run.is_quick else num_prompts)


def convert(run: Run) -> None:
    source, out = run.work / "checkpoint", run.work / "converted"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    run.script("make_checkpoint.py", source, *(["--layers", 3, "--shard-gb", 1] if run.is_quick else []))
    for rounding in ("rtn", "search"):
        run.script("convert.py", source, out, "--rounding", rounding)
    shutil.rmtree(source)


def with_demo(name: str, quick_words: tuple = ()) -> Callable[[Run], None]:
    """A part that needs the demo's BF16 checkpoint."""

    def measure(run: Run) -> None:
        if run.demo is None:
            print(f"{name} is left out: it needs --demo", file=sys.stderr)
            return
        run.script(f"{name}.py", run.demo, *(quick_words if run.is_quick else ()))

    return measure


PARTS: dict[str, Callable[[Run], None]] = {
    "io": installed("io"),
    "kernels": installed("kernels", takes_model=False),
    "decode": installed("decode"),
    "prefill": installed("prefill"),
    "tiers": installed("tiers"),
    "policies": lambda run: run.script("policies.py"),
    "serve": serve,
    "speculation": speculation,
    "convert": convert,
    "startup": lambda run: run.script("startup.py", 2 if run.is_quick else 9),
    "quality": with_demo("quality"),
    "rounding": with_demo("rounding", ("--widths", "2/2/0")),
    "machines": lambda run: run.script("machines.py"),
    "published": lambda run: run.script("published.py"),
    "predict": lambda run: run.script("predict.py", run.slice(), *(["--tokens", 8] if run.is_quick else [])),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--demo", type=Path, help="the demo's BF16 checkpoint")
    parser.add_argument("--slice", type=Path, help="a slice made by make_slice.py, in place of writing one")
    parser.add_argument("--work", type=Path, default=record.ROOT / "build/bench", help="on the disk to measure")
    parser.add_argument("--results", type=Path, help="where results go, in place of bench/results; README.md stays")
    parser.add_argument("--quick", action="store_true", help="small sizes; needs --results")
    parser.add_argument("--keep", action="store_true", help="leave what was written below --work")
    arguments = parser.parse_args()
    if arguments.quick and not arguments.results:
        parser.error("--quick gives no figures to publish; name another folder for its --results")
    record.RESULTS = (arguments.results or record.RESULTS).resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    failed = []
    run = Run(arguments.work.resolve(), arguments.slice, arguments.demo, arguments.quick)
    try:
        for name in arguments.only:
            began = time.perf_counter()
            try:
                PARTS[name](run)
                print(f"== {name}: {time.perf_counter() - began:.0f} s", flush=True)
            except (GlmGpuError, subprocess.CalledProcessError, OSError) as error:
                failed.append(name)
                print(f"== {name} failed: {error}", file=sys.stderr, flush=True)
    finally:
        if not arguments.keep:
            run.clean()
    run.script("render.py", *(["--no-readme"] if arguments.results else []))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
