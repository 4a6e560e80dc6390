"""A model several times larger than its memory: does it stay within the budget, and does the disk run at its speed?

Runs a slice with real expert sizes under a budget of a quarter of it, in a process whose private memory the system
limits to little more. Beside it, in the same run, experts are read at random as `glm-gpu bench io` does.

    python bench/make_slice.py --out slice --layers 4 --experts 96
    python bench/tiers.py slice [--share 0.25] [--tokens 24]

Printed, with one JSON line at the end: peak anonymous memory against the budget; bytes read a second while decoding
against the disk's own; the part of the computing that was hidden behind reads.
"""

import argparse
import json
import resource
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.engine import Engine
from glm_gpu.kernels import cpu
from glm_gpu.machine import anon_rss_bytes, cpu_name
from glm_gpu.opening import EngineOptions
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.files import ExpertFiles, Run
from glm_gpu.tiers.read_bench import read_rate
from glm_gpu.units import format_bytes

# Beside the plan's bytes the limit counts what is reserved and never touched: stacks of threads, allocator arenas.
LIMIT_SLACK = 512 << 20


class PeakMemory:
    """Samples this process's anonymous memory until stopped."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._is_stopped.set()
        self._thread.join()
        return self.peak_bytes

    def _sample(self) -> None:
        while not self._is_stopped.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, anon_rss_bytes())


def all_runs(path: Path) -> list[Run]:
    with Checkpoint.open(path) as checkpoint:
        files = ExpertFiles(checkpoint, Recipe.default(), list(checkpoint.config.sparse_layers))
        runs = [files.run(layer, expert) for layer in files.layers for expert in range(files.num_experts)]
    return [run for run in runs if run]


def decode(engine: Engine, num_tokens: int, rng: np.random.Generator) -> float:
    """Seconds for so many tokens."""
    cache = engine.model.new_cache(num_tokens + 1, is_bf16=True)
    began = time.perf_counter()
    for token in rng.integers(0, engine.config.vocab_size, num_tokens):
        engine.model.forward(Batch.of([([int(token)], cache)], "decode"))
    return time.perf_counter() - began


def compute_seconds(path: Path, num_tokens: int) -> float:
    """Seconds that the same tokens take while nothing is read, from the time a pass waits for no read."""
    with Engine.open(path, EngineOptions(context=256, speculate="off", prefetch="off")) as engine:
        while any(tier.name == "disk" and tier.num_experts for tier in engine.store.report()):
            engine.store.begin_pass("prefill")
            time.sleep(0.1)
        return decode(engine, num_tokens, np.random.default_rng(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode with a fraction of the memory a model needs.")
    parser.add_argument("slice", type=Path)
    parser.add_argument("--share", type=float, default=0.25, help="of the container's bytes")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--read-threads", type=int, default=4)
    parser.add_argument("--prefetch", choices=["on", "off", "auto"], default="auto")
    args = parser.parse_args()
    total = sum(shard.stat().st_size for shard in args.slice.glob("*.safetensors"))
    ram, runs = int(total * args.share), all_runs(args.slice)
    compute_s = compute_seconds(args.slice, args.tokens)

    resource.setrlimit(resource.RLIMIT_DATA, (ram + LIMIT_SLACK, ram + LIMIT_SLACK))
    memory = PeakMemory()
    options = EngineOptions(
        ram=ram, context=256, read="direct", read_threads=args.read_threads, prefetch=args.prefetch, speculate="off"
    )
    disk_gb_s, rates, hidden, walls = [], [], [], []
    with Engine.open(args.slice, options) as engine:
        files = engine.store.files
        decode(engine, 8, np.random.default_rng(1))  # the background reads of the start, and a warm cache
        for seed in range(3):
            disk_gb_s.append(read_rate(runs, "direct", args.read_threads, 1.0))
            bytes_before = files.bytes_read
            walls.append(decode(engine, args.tokens, np.random.default_rng(seed)))
            num_bytes = files.bytes_read - bytes_before
            rates.append(num_bytes / walls[-1] / 1e9)
            # computing and reading one after the other would have taken so long; what was saved was done at once
            apart_s = compute_s + num_bytes / disk_gb_s[-1] / 1e9
            hidden.append(max(0.0, min(1.0, (apart_s - walls[-1]) / compute_s)))
        plan, counters = engine.plan, engine.store.counters
    peak = memory.stop()
    wall, hits = statistics.median(walls), counters.phases["decode"]
    row = {
        "bench": "tiers", "cpu": cpu_name(), "kernels": cpu.implementation(), "threads": cpu.get_threads(),
        "container_bytes": total, "ram_bytes": ram, "planned_bytes": plan.ram_bytes, "peak_anonymous_bytes": peak,
        "slots": sum(plan.num_slots.values()), "experts": len(runs), "hit_rate": hits.hit_rate,
        "decode_tok_s": args.tokens / wall, "resident_tok_s": args.tokens / compute_s,
        "read_gb_s": statistics.median(rates), "disk_gb_s": statistics.median(disk_gb_s),
        "share_of_disk": statistics.median(rates) / statistics.median(disk_gb_s),
        "compute_hidden": statistics.median(hidden), "prefetch_recall": counters.recall,
    }  # fmt: skip
    print(f"memory   {format_bytes(peak)} at most, {format_bytes(ram)} allowed, {format_bytes(total)} of weights")
    share = f"{row['share_of_disk']:.0%} of the disk's {row['disk_gb_s']:.2f}"
    print(f"reads    {row['read_gb_s']:.2f} GB/s while decoding, {share}")
    print(f"overlap  {row['compute_hidden']:.0%} of the computing was done while reads were under way")
    print(f"decode   {row['decode_tok_s']:.2f} tok/s, {row['resident_tok_s']:.2f} with everything in memory")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
