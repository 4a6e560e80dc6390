"""Speed of the products on this machine, each beside the limit measured in the same minute.

One JSON line a row: kernel, shape, threads, median and spread of the time, GB/s or GMAC/s, and the share of the limit:
the read bandwidth of equally much memory for few tokens, the peak rate of the multiply instruction in use for many.
The weights of a row are `--memory` of distinct matrices, taken in turn, so that they come from memory and not from a
cache. The limit is measured before and after each row, and the better of the two counts.

    python bench/kernels.py --threads 1 2 --memory 1GiB
"""

import argparse
import json
import statistics
import time

import numpy as np

from glm_gpu import quant
from glm_gpu.kernels import cpu
from glm_gpu.kernels.absorb import absorb_query, expand_value
from glm_gpu.kernels.experts import expert_ffn
from glm_gpu.kernels.limits import integer_multiply_adds_s, read_bytes_s
from glm_gpu.kernels.matmul import matmul
from glm_gpu.machine import cpu_name
from glm_gpu.slab import SlabLayout
from glm_gpu.units import parse_bytes

SCALE = 0.01
PREFILL_TOKENS = (16, 64, 256)


BLOCK = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


def random_bytes(size):
    """Memory of its own, filled with the same random megabyte again and again."""
    return np.resize(BLOCK, size)


def random_matrix(format_name, shape):
    format = quant.Format.parse(format_name)
    data = random_bytes(format.data_nbytes(*shape)).reshape(shape[0], -1)
    scales = np.full((shape[0], format.num_groups(shape[1])), SCALE, np.float32)
    return quant.QuantizedMatrix(format, shape, data, scales)


def random_slab(layout):
    slab = random_bytes(layout.nbytes)
    for view in layout.views(slab):
        view.scales[...] = SCALE
    return slab


def times(call, num_calls):
    """Seconds of each call; call(i) takes the i-th weights."""
    call(0)
    taken = []
    for i in range(num_calls):
        begin = time.perf_counter()
        call(i)
        taken.append(time.perf_counter() - begin)
    return taken


class Bench:
    """Measures one row after another and prints them."""

    def __init__(self, memory_bytes):
        self.memory_bytes = memory_bytes

    def read_gb_s(self):
        """Read bandwidth on the kernels' own threads, of as much memory as a row's weights take."""
        return read_bytes_s(self.memory_bytes) / 1e9

    def peak_gmac_s(self):
        """Multiply-adds a second of the instruction that int16 activations use, on all threads."""
        return integer_multiply_adds_s() / 1e9

    def row(self, kernel, shape, tokens, call, num_calls, amount, limit, unit):
        """amount: bytes or multiply-adds of a call; limit: a function that measures what the machine can do."""
        before = limit()
        taken = times(call, num_calls)
        best = max(before, limit())
        median = statistics.median(taken)
        rate = amount / median / 1e9
        quarter = max(1, len(taken) // 4)
        spread = (sorted(taken)[-quarter] - sorted(taken)[quarter - 1]) / median
        row = {
            "kernel": kernel,
            "shape": shape,
            "tokens": tokens,
            "threads": cpu.get_threads(),
            "median_us": round(median * 1e6, 1),
            "spread": round(spread, 3),
            unit: round(rate, 2),
            "limit": round(best, 2),
            "share": round(rate / best, 3),
        }
        print(json.dumps(row), flush=True)

    def decode(self, format_name, shape, tokens):
        size = random_matrix(format_name, shape).nbytes
        matrices = [random_matrix(format_name, shape) for _ in range(max(2, self.memory_bytes // size))]
        x = np.random.default_rng(0).standard_normal((tokens, shape[1]), np.float32)
        self.row(
            f"matmul {format_name}",
            list(shape),
            tokens,
            lambda i: matmul(x, matrices[i % len(matrices)]),
            len(matrices),
            size,
            self.read_gb_s,
            "gb_s",
        )

    def prefill(self, format_name, shape, tokens):
        w = random_matrix(format_name, shape)
        x = np.random.default_rng(0).standard_normal((tokens, shape[1]), np.float32)
        macs = tokens * shape[0] * shape[1]
        self.row(
            f"matmul {format_name}", list(shape), tokens, lambda _: matmul(x, w), 9, macs, self.peak_gmac_s, "gmac_s"
        )

    def experts(self, tokens, num_chosen=8):
        layout = SlabLayout(quant.Format.parse("int4_g64"), 6144, 2048)
        num_sets = max(2, self.memory_bytes // (num_chosen * layout.nbytes))
        slabs = [random_slab(layout) for _ in range(num_sets * num_chosen)]
        x = np.random.default_rng(0).standard_normal((tokens, layout.hidden), np.float32)
        choice = np.tile(np.arange(num_chosen, dtype=np.int32), (tokens, 1))
        weights = np.full(choice.shape, 1 / num_chosen, np.float32)

        def call(i):
            first = i % num_sets * num_chosen
            return expert_ffn(x, slabs[first : first + num_chosen], layout, choice, weights)

        size = num_chosen * layout.nbytes
        self.row("experts int4_g64", [8, 2048, 6144], tokens, call, 3 * num_sets, size, self.read_gb_s, "gb_s")

    def absorbed(self, tokens=1):
        heads, nope, value, width = 64, 192, 256, 512
        shape = (heads * (nope + value), width)
        size = random_matrix("int4_g64", shape).nbytes
        matrices = [random_matrix("int4_g64", shape) for _ in range(max(2, self.memory_bytes // size))]
        rng = np.random.default_rng(0)
        q = rng.standard_normal((tokens, heads, nope), np.float32)
        o = rng.standard_normal((tokens, heads, width), np.float32)
        calls = {
            "absorb_query": (nope, lambda i: absorb_query(q, matrices[i % len(matrices)], value)),
            "expand_value": (value, lambda i: expand_value(o, matrices[i % len(matrices)], nope)),
        }
        for name, (rows, call) in calls.items():
            amount = size * rows // (nope + value)
            self.row(f"{name} int4_g64", list(shape), tokens, call, len(matrices), amount, self.read_gb_s, "gb_s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, cpu.get_threads()])
    parser.add_argument("--memory", default="1GiB", help="distinct weights of each row; more than the last cache holds")
    arguments = parser.parse_args()
    if cpu.active is None:
        parser.error("the C extension is not built")
    machine = {"machine": cpu_name(), "kernels": cpu.implementation(), "memory": arguments.memory}
    print(json.dumps(machine), flush=True)
    bench = Bench(parse_bytes(arguments.memory))
    for num_threads in dict.fromkeys(arguments.threads):
        cpu.set_threads(num_threads)
        bench.decode("int4_g64", (2048, 6144), 1)
        bench.decode("int4_g64", (6144, 2048), 1)
        bench.decode("int8", (2048, 6144), 1)
        bench.decode("int4_g64", (2048, 6144), 4)
        for tokens in (1, 2, 4):
            bench.experts(tokens)
        bench.absorbed()
        for tokens in PREFILL_TOKENS:
            bench.prefill("int4_g64", (2048, 6144), tokens)


if __name__ == "__main__":
    main()
