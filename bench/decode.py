"""Decode and prefill of a slice of GLM-5.2 with real dimensions, everything resident, against the machine's limits.

A decoded token reads every dense weight once and the chosen experts: so many bytes, at most as fast as memory was read
just before and just after. One JSON line at the end.

    python bench/make_slice.py --out slice --layers 4 --experts 128
    python bench/decode.py slice [--threads 2]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.engine import Engine
from glm_gpu.kernels import cpu
from glm_gpu.kernels.limits import read_bytes_s
from glm_gpu.machine import cpu_name
from glm_gpu.opening import EngineOptions
from glm_gpu.recipe import tensor_class
from glm_gpu.tensors import expected_tensors

NUM_TOKENS = 32
PROMPT = 512


def bytes_per_token(engine: Engine) -> int:
    """Bytes of weights that one decoded token reads."""
    config, total = engine.config, 0
    recipe = EngineOptions().recipe
    for name, shape in expected_tensors(config).items():
        kind = tensor_class(name, config)
        if name == "model.embed_tokens.weight" or kind in ("mtp", "mtp_expert"):
            continue
        format = recipe.format_for(name, config)
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        nbytes = format.data_nbytes(rows, columns) + 4 * format.scale_count(rows, columns)
        total += nbytes * config.num_experts_per_tok // config.n_routed_experts if kind == "expert" else nbytes
    return total


def times_of_decoding(engine: Engine, rng: np.random.Generator) -> list[float]:
    """Seconds of each step, with a context of a few tokens."""
    cache, times = engine.model.new_cache(NUM_TOKENS + 8, is_bf16=True), []
    for token in rng.integers(0, engine.config.vocab_size, NUM_TOKENS + 4):
        began = time.perf_counter()
        engine.model.forward(Batch.of([([int(token)], cache)], "decode"))
        times.append(time.perf_counter() - began)
    return times[4:]


class KernelClock:
    """Stands in for the C extension and adds up the time spent in it; the clock itself costs 0.1 us a call."""

    def __init__(self, extension) -> None:
        self.seconds = 0.0
        self._extension = extension

    def __getattr__(self, name: str):
        function = getattr(self._extension, name)

        def timed(*arguments):
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        setattr(self, name, timed)  # from now on without this detour
        return timed


def python_share(engine: Engine, rng: np.random.Generator) -> float:
    """Median share of a step that is not spent in the C kernels."""
    cache, shares = engine.model.new_cache(NUM_TOKENS + 8, is_bf16=True), []
    clock = KernelClock(cpu.active)
    cpu.active = clock
    try:
        for token in rng.integers(0, engine.config.vocab_size, NUM_TOKENS + 4):
            clock.seconds = 0.0
            began = time.perf_counter()
            engine.model.forward(Batch.of([([int(token)], cache)], "decode"))
            shares.append(1 - clock.seconds / (time.perf_counter() - began))
    finally:
        cpu.active = clock._extension
    return statistics.median(shares[4:])


def seconds_of_prefill(engine: Engine, rng: np.random.Generator) -> float:
    ids = rng.integers(0, engine.config.vocab_size, PROMPT).tolist()
    cache = engine.model.new_cache(PROMPT, is_bf16=True)
    began = time.perf_counter()
    engine.model.forward(Batch.of([(ids, cache)], "prefill"))
    return time.perf_counter() - began


def wait_until_resident(engine: Engine) -> None:
    """Until the background reads are done, so that decoding is measured and not the disk."""
    while any(tier.name == "disk" and tier.num_experts for tier in engine.store.report()):
        engine.store.begin_pass("prefill")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode and prefill of a slice against memory bandwidth.")
    parser.add_argument("slice", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    with Engine.open(args.slice, EngineOptions(threads=args.threads, context=PROMPT + 8)) as engine:
        wait_until_resident(engine)
        rates, shares, prefills = [], [], []
        touched = bytes_per_token(engine)
        outside = []
        for _ in range(args.rounds):
            before = read_bytes_s(1 << 30)
            step_s = statistics.median(times_of_decoding(engine, rng))
            bandwidth = (before + read_bytes_s(1 << 30)) / 2
            outside.append(python_share(engine, rng))
            rates.append(1 / step_s)
            shares.append(touched / step_s / bandwidth)
            prefills.append(PROMPT / seconds_of_prefill(engine, rng))
    row = {
        "bench": "decode", "cpu": cpu_name(), "kernels": cpu.implementation(), "threads": cpu.get_threads(),
        "bytes_per_token": touched, "decode_tok_s": statistics.median(rates), "decode_spread": [min(rates), max(rates)],
        "share_of_bandwidth": statistics.median(shares), "prefill_tok_s": statistics.median(prefills),
        "python_share": statistics.median(outside),
        "prefill_over_decode": statistics.median(prefills) / statistics.median(rates),
    }  # fmt: skip
    print(f"{row['decode_tok_s']:.2f} tok/s decode, {row['share_of_bandwidth']:.0%} of memory bandwidth; ", end="")
    print(f"{row['prefill_tok_s']:.1f} tok/s prefill of {PROMPT} tokens; {row['python_share']:.1%} of a step is Python")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
