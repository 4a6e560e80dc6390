"""Parts that must cost a user nothing: each one's time, with the bound that it was written for beside it.

    python bench/parts.py

One JSON line a row: the median and extremes of several runs, in seconds of processor time.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from glm_gpu.engine import DEMO_MODEL
from glm_gpu.safetensors_index import index_shards
from glm_gpu.safetensors_write import write_safetensors
from glm_gpu.sampling import SamplingParams, make_rng, sample
from glm_gpu.speculative import NgramDrafter
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import Ranking, layer_worth
from glm_gpu.tokenizer import Tokenizer

VOCAB = 154_880
NUM_SHARDS, TENSORS_PER_SHARD = 144, 834
RUNS = 15


def index_case(folder: Path) -> Callable[[], object]:
    """Index 120,000 tensors in 144 shards."""
    weight_map = {}
    for shard in range(NUM_SHARDS):
        name = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        names = [
            f"model.layers.{shard % 78}.mlp.experts.{n}.gate_proj.weight.{shard}" for n in range(TENSORS_PER_SHARD)
        ]
        write_safetensors(folder / name, [(tensor, "F8_E4M3", (2, 1), b"ab") for tensor in names])
        weight_map |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return lambda: index_shards(folder)


def sample_case() -> Callable[[], object]:
    """Choose a token of GLM-5.2's vocabulary with top-k and top-p."""
    logits = (np.random.default_rng(0).standard_normal(VOCAB) * 6).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    return partial(sample, logits, params, np.zeros(0, np.int64), make_rng(0))


def victim_case() -> Callable[[], object]:
    """Choose which of 19,968 experts to give up."""
    heat, rng = Heat(78, 256), np.random.default_rng(0)
    for layer in range(78):
        heat.count(layer, np.array([rng.permutation(256)[:8] for _ in range(8)]), "decode")
    ranking = Ranking(partial(layer_worth, heat), range(78))
    for layer in range(78):
        ranking.offer(layer, range(256))
    return ranking.least


def draft_case() -> Callable[[], object]:
    """Draft 8 tokens by the longest repetition in 200,000."""
    ids, drafter = np.random.default_rng(1).integers(0, 4, 200_000).tolist(), NgramDrafter()
    return partial(drafter.draft, ids, 8)


def stream_case() -> Callable[[], object]:
    """Turn 1,000 tokens into text one by one, behind 100,000 others."""
    tokenizer = Tokenizer.open(DEMO_MODEL)
    stream, ids = tokenizer.stream(), tokenizer.encode("ё" * 1000)
    for _ in range(100_000 // len(ids)):
        for token_id in ids:
            stream.push(token_id)
    return lambda: [stream.push(token_id) for token_id in ids]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            (index_case(Path(folder)), index_case, 2.0),
            (sample_case(), sample_case, 2e-3),
            (victim_case(), victim_case, 20e-6),
            (draft_case(), draft_case, 1e-3),
            (stream_case(), stream_case, 10e-3),
        ]
        for call, case, bound_s in cases:
            call()
            seconds = []
            for _ in range(RUNS):
                began = time.thread_time()
                call()
                seconds.append(time.thread_time() - began)
            median = statistics.median(seconds)
            print(f"{median * 1e3:9.3f} ms of {bound_s * 1e3:g}   {case.__doc__}")
            row = {"median_s": median, "spread_s": [min(seconds), max(seconds)], "bound_s": bound_s}
            print(json.dumps({"bench": "parts", "part": case.__name__.removesuffix("_case")} | row))


if __name__ == "__main__":
    main()
