"""llama.cpp on the same slice, in turns with this engine: decode from an empty context, and a prompt of 512 tokens.

    python bench/make_slice.py --out slice --layers 4 --experts 96
    python tools/slice_to_gguf.py slice slice.gguf
    build/bin/llama-quantize --allow-requantize --pure slice.gguf slice_q4k.gguf Q4_K_S
    python bench/peer.py slice slice.gguf slice_q4k.gguf --llama-bench build/bin/llama-bench

The result is a ratio of rates that were measured within the same minutes, with as many threads each; both have their
weights in memory twice over, so it takes 20 GB. llama-bench must be built for the machine it runs on (GGML_NATIVE).
Where that has AMX it aborts on attn_k_b and attn_v_b in four bits: they have to stay BF16, as slice.gguf has them.
"""

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import record

from glm_gpu.batch import Batch
from glm_gpu.bench.decode import filled, step_seconds
from glm_gpu.bench.measurement import Limit, Part, model_part, seconds
from glm_gpu.engine import Engine
from glm_gpu.kernels import cpu

PROMPT, TOKENS = 512, 32


def decode_rate(engine: Engine) -> float:
    """Tokens a second behind an empty context."""
    return TOKENS / sum(step_seconds(engine, 0, TOKENS))


def prefill_rate(engine: Engine) -> float:
    """Tokens a second of a prompt."""
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, PROMPT).tolist()
    batch = Batch.of([(ids, engine.model.new_cache(PROMPT, is_bf16=True))], "prefill")
    return PROMPT / seconds(lambda: engine.model.forward(batch))


@dataclass(frozen=True)
class Peer:
    """One run of llama-bench: rates of decode and of the prompt, its build, and how it calls the weights' format."""

    rates: tuple[float, float]
    build: str
    format: str


def run_peer(program: Path, model: Path) -> Peer:
    """One model file.

    Raises:
        CalledProcessError: llama-bench failed.
    """
    words = ["-m", model, "-p", PROMPT, "-n", TOKENS, "-t", cpu.get_threads(), "-r", 1, "-o", "json"]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True)
    rows = {"decode" if row["n_gen"] else "prefill": row for row in json.loads(done.stdout)}
    decode = rows["decode"]
    format = decode["model_type"].split("B ")[-1]  # of "glm-dsa ?B Q4_K - Small"
    return Peer((decode["avg_ts"], rows["prefill"]["avg_ts"]), decode["build_commit"], format)


def measure(path: Path, models: list[Path], program: Path, num_rounds: int) -> Part:
    """All engines in turns."""
    part = model_part("peer", path)
    own: list[tuple[float, float]] = []
    peers: list[list[Peer]] = [[] for _ in models]
    with filled(path, None, PROMPT + TOKENS) as (engine, note):
        for _ in range(num_rounds):
            own.append((decode_rate(engine), prefill_rate(engine)))
            for runs, model in zip(peers, models, strict=True):
                runs.append(run_peer(program, model))
        part.notes += [note] if note else []
    for index, name in enumerate(("decode, empty context", f"prompt of {PROMPT} tokens")):
        for runs in peers:
            theirs, build, format = [run.rates[index] for run in runs], runs[0].build, runs[0].format
            spread = f"{min(theirs):.1f} to {max(theirs):.1f}"
            limit = Limit(float(np.median(theirs)), f"llama.cpp {build}, {format}, {spread}")
            part.add(f"{name}, beside {format}", (rates[index] for rates in own), "tok/s", limit)
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slice", type=Path)
    parser.add_argument("gguf", type=Path, nargs="+", help="the same slice, by tools/slice_to_gguf.py, in any formats")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    part = measure(arguments.slice, arguments.gguf, arguments.llama_bench, arguments.rounds)
    for row in part.rows:
        print(f"{row.name}: {row.median:.1f} tok/s, {row.share:.2f} times {row.limit.value:.1f} of {row.limit.name}")
    record.save("peer", part.document())


if __name__ == "__main__":
    main()
