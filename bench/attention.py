"""Speed of attention, indexer, router and norms at GLM-5.2's sizes, one token, against limits measured beside.

Usage: python bench/attention.py [THREADS [IMPLEMENTATION]]. One JSON line a row: median and best milliseconds, and the
best's share of the limit: f32 products and sums a second (each rounded on its own), or bytes read a second; none for
what stays in a cache. Wall time on both sides: where `load` exceeds the cores, shares mean little.
"""

import json
import os
import statistics
import sys
import time

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.activation import silu_mul
from glm_gpu.kernels.attention import attend_explicit, attend_latent
from glm_gpu.kernels.indexer import index_scores, select_top
from glm_gpu.kernels.limits import multiply_add_flops, read_bytes_s
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.kernels.rope import rope_interleaved, rope_tables
from glm_gpu.kernels.router import route
from glm_gpu.machine import cpu_name
from glm_gpu.quant import f32_to_bf16

HEADS, LATENT, ROPE = 64, 512, 64
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK = 32, 128, 2048
HIDDEN, EXPERTS, CONTEXT = 6144, 256, 32768
REPEATS = 31
ROUTERS = 64  # 6.3 MB each: together more than most last-level caches, as in a decode step

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def attention_cases():
    """name, call, f32 operations, bytes read."""
    q = normal(1, HEADS, LATENT + ROPE)
    chosen = np.sort(rng.permutation(CONTEXT)[:INDEX_TOPK]).astype(np.int32)[None]
    counts = np.int32([INDEX_TOPK])
    operations = HEADS * INDEX_TOPK * (2 * LATENT + ROPE) * 2
    f32 = normal(CONTEXT, LATENT + ROPE)
    bf16 = f32_to_bf16(f32)
    for name, cache in (("bf16", bf16), ("f32", f32)):
        yield (
            f"attend_latent {name}, {INDEX_TOPK} chosen of {CONTEXT}",
            lambda cache=cache: attend_latent(q, cache, LATENT, chosen, counts, 1 / 16),
            operations,
            0,
        )
    yield (
        f"attend_latent bf16, first {INDEX_TOPK}",
        lambda: attend_latent(q, bf16, LATENT, None, counts, 1 / 16),
        operations,
        0,
    )
    several = normal(8, HEADS, LATENT + ROPE)
    yield (
        f"attend_latent bf16, 8 tokens, first {INDEX_TOPK}",
        lambda: attend_latent(several, bf16, LATENT, None, np.repeat(counts, 8), 1 / 16),
        8 * operations,
        0,
    )
    heads = normal(1, 16, 128)
    keys, values = normal(INDEX_TOPK, 16, 128), normal(INDEX_TOPK, 16, 128)
    yield (
        f"attend_explicit f32, 16 heads of 128, first {INDEX_TOPK}",
        lambda: attend_explicit(heads, keys, values, None, counts, 0.09),
        0,
        keys.nbytes + values.nbytes,  # every byte is used once: reading is the limit
    )


def other_cases():
    """name, call, f32 operations, bytes read from memory."""
    queries, head_weights = normal(1, INDEX_HEADS, INDEX_WIDTH), normal(1, INDEX_HEADS)
    index_keys, counts = f32_to_bf16(normal(CONTEXT, INDEX_WIDTH)), np.int32([CONTEXT])
    scores = index_scores(queries, head_weights, index_keys, counts, 0.09)
    yield (
        f"index_scores bf16, {CONTEXT} positions",
        lambda: index_scores(queries, head_weights, index_keys, counts, 0.09),
        INDEX_HEADS * INDEX_WIDTH * CONTEXT * 2,
        0,
    )
    yield (
        f"select_top {INDEX_TOPK} of {CONTEXT}",
        lambda: select_top(scores, counts, INDEX_TOPK),
        0,
        0,
    )
    x, bias = normal(1, HIDDEN), normal(EXPERTS)
    gates = [normal(EXPERTS, HIDDEN) for _ in range(ROUTERS)]
    turns = iter(range(10**9))
    yield (
        f"route {EXPERTS} experts",
        lambda: route(x, gates[next(turns) % ROUTERS], bias, 8, 1, 1, True, 2.5),
        0,
        gates[0].nbytes,
    )
    weight, gate = normal(HIDDEN), normal(1, 2 * HIDDEN)
    tables, rotated = rope_tables([CONTEXT], 8e6, ROPE), normal(1, HEADS, ROPE)
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-5), 0, 0
    yield "silu_mul", lambda: silu_mul(gate, gate), 0, 0
    yield "rope_interleaved", lambda: rope_interleaved(rotated, *tables), 0, 0


def main() -> None:
    if len(sys.argv) > 1:
        cpu.set_threads(int(sys.argv[1]))
    with cpu.use(sys.argv[2] if len(sys.argv) > 2 else cpu.implementation()):
        machine = {"cpu": cpu_name(), "implementation": cpu.implementation(), "threads": cpu.get_threads()}
        limits = {"gflop_s": multiply_add_flops() / 1e9, "gb_s": read_bytes_s(512 << 20) / 1e9}
        print(json.dumps(machine | limits | {"load": os.getloadavg()[0]}))
        for cases in (attention_cases(), other_cases()):
            for name, call, operations, num_bytes in cases:
                call()
                times = sorted(_seconds(call) for _ in range(REPEATS))
                row = {"name": name, "median_ms": statistics.median(times) * 1e3, "best_ms": times[0] * 1e3}
                if operations:
                    limit = multiply_add_flops()
                    row |= {"gflop_s": operations / times[0] / 1e9, "share": operations / times[0] / limit}
                elif num_bytes:
                    row |= {"gb_s": num_bytes / times[0] / 1e9, "share": num_bytes / times[0] / 1e9 / limits["gb_s"]}
                print(json.dumps({key: v if isinstance(v, str) else round(v, 4) for key, v in row.items()}))


def _seconds(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
