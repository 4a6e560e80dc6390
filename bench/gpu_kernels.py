"""Parts of bench/gpu.py about single kernels, copies and launches, at GLM-5.2's shapes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from glm_gpu.bench.measurement import Limit, Part
from glm_gpu.device import NUMPY_DTYPES, Arena, Device, to_host
from glm_gpu.device_link import measure_link
from glm_gpu.kernels.gpu import experts as gpu_experts
from glm_gpu.kernels.gpu.arrays import DeviceMatrix, View
from glm_gpu.kernels.gpu.attention import attend_latent, parts_shape
from glm_gpu.kernels.gpu.indexer import index_scores, select_top
from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.kernels.gpu.projection import project
from glm_gpu.kernels.gpu.router import num_parts, route
from glm_gpu.kernels.gpu.sampling import argmax, num_blocks
from glm_gpu.quant import FORMATS, QuantizedMatrix, bf16_to_f32, dequantize, f32_to_bf16
from glm_gpu.slab import SlabLayout

Open = Callable[..., AbstractContextManager[list[Device]]]

# Dense bf16 with f32 sums, as the makers' data sheets have it, in TFLOP/s.
DATASHEET_TFLOP_S = {
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "B200": 2250,
    "4090": 165,
    "5090": 210,
    "3090": 71,
    "L40": 181,
}
# Rows of a pass: decoding and verification up to 16, prompts beyond.
ROWS = (1, 2, 4, 8, 16, 64, 512)


@dataclass(frozen=True)
class Sizes:
    """Widths of GLM-5.2, or small ones of the same kind."""

    hidden: int = 6144
    width: int = 2048
    num_experts: int = 64
    experts_per_tok: int = 8
    heads: int = 64
    rank: int = 512
    rope: int = 64
    q_rank: int = 2048
    head_dim: int = 256
    index_heads: int = 32
    index_width: int = 128
    positions: int = 8192
    top_k: int = 2048


SMALL = Sizes(256, 128, 8, 2, 4, 64, 16, 128, 32, 2, 32, 256, 64)


class Timer:
    """Times of work on a device: by its own events on a card, by the clock in the simulator."""

    def __init__(self, device: Device, is_quick: bool) -> None:
        self._device, self._repeats = device, 1 if is_quick else 20

    def samples(self, work: Callable[[int], None], rounds: int = 3) -> list[float]:
        """Seconds of one call, a few times; `work` takes the call's number, to go through different memory."""
        device, found = self._device, []
        with device.computing():
            work(0)
            device.compute.synchronize()
            for _ in range(1 if self._repeats == 1 else rounds):
                found.append(self._once(work))
        return found

    def _once(self, work: Callable[[int], None]) -> float:
        device = self._device
        if device.is_simulated:
            began = time.perf_counter()
            work(0)
            device.compute.synchronize()
            return time.perf_counter() - began
        first, last = device.cuda.Event(), device.cuda.Event()
        first.record(device.compute.stream)
        for n in range(self._repeats):
            work(n)
        last.record(device.compute.stream)
        last.synchronize()
        return device.cuda.get_elapsed_time(first, last) / 1e3 / self._repeats


def measure_copies(part: Part, open_devices: Open, is_quick: bool) -> None:
    """Memory on the card, pinned memory over the link, and both beside kernels."""
    with open_devices() as (device,):
        num_bytes = 1 << 20 if is_quick else 512 << 20
        arena = Arena(device, 3 * num_bytes)
        one, other = arena.take((num_bytes,), "u8"), arena.take((num_bytes,), "u8")
        seconds = Timer(device, is_quick).samples(lambda n: device.hop(one, other, device))
        part.add("copy on the card (read + write)", [2 * num_bytes / s / 1e9 for s in seconds], "GB/s")
        link = measure_link(device, 1 << 20 if is_quick else 256 << 20)
        limit = _link_limit(device)
        part.add("copy from pinned memory", [link.copy_bytes_s / 1e9], "GB/s", limit)
        part.add("kernel that reads pinned memory", [link.mapped_bytes_s / 1e9], "GB/s", limit)
        _measure_overlap(part, device, one, num_bytes, is_quick)


def _link_limit(device: Device) -> Limit | None:
    """The link's rate by its generation and width, where NVML tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(device.info.pci)
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except Exception:
        return None
    return Limit(
        {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}[generation] * lanes, f"PCIe {generation} x{lanes}"
    )


def _measure_overlap(part: Part, device: Device, target: View, num_bytes: int, is_quick: bool) -> None:
    """How much of a copy is hidden behind kernels of the same length."""
    source, arena = device.host_array((num_bytes,), np.uint8), Arena(device, num_bytes * 3)
    width = 256 if is_quick else 4096
    x = arena.take((num_bytes // (8 * width), width), "f32")
    split = arena.take(x.shape, "bf16")

    def compute(times: int) -> None:
        for _ in range(times):
            rms_norm(device.launcher, x, None, 1e-5, split=split)

    def clock(copies: bool, times: int) -> float:
        began = time.perf_counter()
        with device.computing():
            if copies:
                device.load(target, source, device.copy)
            compute(times)
        device.compute.synchronize()
        device.copy.synchronize()
        return time.perf_counter() - began

    clock(True, 1)
    copy_s = clock(True, 0)
    times = max(1, round(8 * copy_s / clock(False, 8)))
    both_s, alone_s = clock(True, times), clock(False, times)
    hidden = (copy_s + alone_s - both_s) / min(copy_s, alone_s)
    part.add("copy hidden behind kernels", [hidden], "share", Limit(1.0, "all of it"))


def measure_launches(part: Part, open_devices: Open, is_quick: bool) -> None:
    """What a launch costs the host, one by one and in a graph, and the time between kernels of a graph."""
    with open_devices() as (device,):
        arena, count = Arena(device, 1 << 20), 10 if is_quick else 500
        x, split = arena.take((1, 256), "f32"), arena.take((1, 256), "bf16")

        def work() -> None:
            for _ in range(count):
                rms_norm(device.launcher, x, None, 1e-5, split=split)

        with device.computing():
            work()
            device.compute.synchronize()
            began = time.perf_counter()
            work()
            queued = time.perf_counter() - began
            device.compute.synchronize()
            graph = device.capture(work)
            graph.replay()
            device.compute.synchronize()
            began = time.perf_counter()
            graph.replay()
            launched = time.perf_counter() - began
            device.compute.synchronize()
            whole = time.perf_counter() - began
        part.add("launch of a kernel, host", [1e6 * queued / count], "us")
        part.add(f"launch of a graph of {count} kernels, host", [1e6 * launched], "us")
        part.add("kernel of one row in a graph", [1e6 * whole / count], "us")


def measure(part: Part, open_devices: Open, is_quick: bool) -> list[str]:
    """Kernels at the model's shapes: GB/s and TFLOP/s, and their first results against NumPy."""
    with open_devices() as (device,):
        bench = _Kernels(part, device, SMALL if is_quick else Sizes(), is_quick)
        for num_rows in (1, 16) if is_quick else ROWS:
            bench.experts(num_rows)
            bench.projection(num_rows)
            bench.attention(num_rows)
        bench.select()
        bench.router()
        bench.best()
        return bench.failures


class _Kernels:
    """Kernels over random weights in one device's memory."""

    def __init__(self, part: Part, device: Device, sizes: Sizes, is_quick: bool) -> None:
        self.part, self.device, self.sizes, self.failures = part, device, sizes, []
        self._timer = Timer(device, is_quick)
        self._rng = np.random.default_rng(1)
        layout = self._layout = SlabLayout(FORMATS["int4_g64"], sizes.hidden, sizes.width)
        free_bytes, _ = device.memory()
        self._arena = Arena(device, min(free_bytes * 3 // 4, 12 << 30))
        self._slabs = [self._slab(layout) for _ in range(sizes.num_experts)]
        addresses = np.array([self._arena.put(slab, "u8").ptr for slab in self._slabs], np.int64)
        self._table = self._arena.put(addresses, "i64")
        self._marked = self._arena.used_bytes
        found = [row.median for row in part.rows if row.name.startswith("copy on the card")]
        self._memory = Limit(found[0], "a copy on the card") if found else None
        name = next((name for name in DATASHEET_TFLOP_S if name in device.info.name), None)
        self._flops = Limit(DATASHEET_TFLOP_S[name], "the data sheet") if name else None
        self._one_row_s: dict[str, float] = {}

    def experts(self, num_rows: int) -> None:
        """All chosen experts of a layer: gate, up and down."""
        sizes, device, layout, take = self.sizes, self.device, self._layout, self._fresh()
        x = self._half(num_rows, sizes.hidden)
        pairs = num_rows * sizes.experts_per_tok
        order = np.argsort(self._rng.random((4, num_rows, sizes.num_experts)), axis=2)
        choices = np.ascontiguousarray(order[:, :, : sizes.experts_per_tok], np.int32)
        pass_size = num_rows, sizes.experts_per_tok, sizes.num_experts
        tile_rows = gpu_experts.rows_per_tile(*pass_size)
        num_tiles = gpu_experts.max_tiles(*pass_size, tile_rows)
        plans = []
        with device.computing():
            for choice in choices:
                plan = take((num_tiles,), "i32"), take((num_tiles, tile_rows), "i32")
                ids = self._arena.put(choice, "i32")
                gpu_experts.plan_tiles(device.launcher, ids, sizes.num_experts, take((2, pairs), "i32"), *plan)
                plans.append(plan)
        hidden, outputs = take((pairs, sizes.width), "bf16"), take((pairs, sizes.hidden), "f32")

        def work(n: int) -> None:
            plan = plans[n % len(plans)]
            gpu_experts.expert_hidden(device.launcher, x, sizes.experts_per_tok, self._table, layout, *plan, hidden)
            gpu_experts.expert_output(device.launcher, hidden, self._table, layout, *plan, outputs)

        num_used = int(np.mean([len(np.unique(choice)) for choice in choices]))
        flops = 2 * pairs * 3 * sizes.hidden * sizes.width
        self._add(f"experts, {num_rows} rows", work, num_used * layout.nbytes, flops)
        with device.computing():
            work(0)
        expert, own = int(choices[0, 0, 0]), to_host(device, outputs)[0]
        gate, up, down = (dequantize(matrix) for matrix in layout.views(self._slabs[expert]))
        row = _unsplit(bf16_to_f32(to_host(device, x)))[0]
        gated = gate @ row
        inner = bf16_to_f32(f32_to_bf16(gated / (1 + np.exp(-gated)) * (up @ row)))
        self._compare(f"experts, {num_rows} rows", own, down @ inner)

    def projection(self, num_rows: int) -> None:
        """The query projection, the largest of attention's."""
        sizes, device = self.sizes, self.device
        take = self._fresh()
        shape = (sizes.heads * sizes.head_dim, sizes.q_rank)
        host = [self._matrix(shape) for _ in range(2)]
        matrices = [
            DeviceMatrix(m.format, m.shape, self._arena.put(m.data, "u8"), self._arena.put(m.scales, "f32"))
            for m in host
        ]
        x, out = self._half(num_rows, sizes.q_rank), take((num_rows, shape[0]), "f32")

        def work(n: int) -> None:
            project(device.launcher, x, matrices[n % 2], out)

        self._add(f"query projection, {num_rows} rows", work, host[0].nbytes, 2 * num_rows * shape[0] * shape[1])
        with device.computing():
            work(0)
        row = _unsplit(bf16_to_f32(to_host(device, x)))[0]
        self._compare(f"query projection, {num_rows} rows", to_host(device, out)[0], dequantize(host[0]) @ row)

    def attention(self, num_rows: int) -> None:
        """Absorbed attention over the positions that the indexer lets through."""
        sizes, device = self.sizes, self.device
        take, width, count = self._fresh(), sizes.rank + sizes.rope, sizes.top_k
        cache = f32_to_bf16(self._rng.standard_normal((count, width), np.float32))
        place = self._arena.put(cache, "bf16")
        q = self._half(num_rows * sizes.heads, width)
        queries = View(q.ptr, (num_rows, sizes.heads, width), "bf16")
        caches = self._arena.put(np.full(num_rows, place.ptr, np.int64), "i64")
        counts = self._arena.put(np.full(num_rows, count, np.int32), "i32")
        parts = take(parts_shape(min(num_rows, 64), sizes.heads, count, sizes.rank), "f32")
        out = take((num_rows, sizes.heads, sizes.rank), "bf16")

        def work(n: int) -> None:
            attend_latent(device.launcher, queries, caches, 0, "bf16", None, counts, width**-0.5, parts, out)

        flops = 2 * num_rows * sizes.heads * count * (width + sizes.rank)
        self._add(f"attention over {count} positions, {num_rows} rows", work, num_rows * cache.nbytes, flops)
        with device.computing():
            work(0)
        head = bf16_to_f32(to_host(device, queries))[0, 0]
        scores = bf16_to_f32(cache) @ head * width**-0.5
        weights = np.exp(scores - scores.max())
        expected = weights @ bf16_to_f32(cache)[:, : sizes.rank] / weights.sum()
        self._compare(f"attention, {num_rows} rows", _unsplit(bf16_to_f32(to_host(device, out)))[0, 0], expected)

    def select(self) -> None:
        """The indexer: scores of every position and the choice of the best."""
        sizes, device = self.sizes, self.device
        take, positions = self._fresh(), sizes.positions
        keys = f32_to_bf16(self._rng.standard_normal((positions, sizes.index_width), np.float32))
        place = self._arena.put(keys, "bf16")
        q = self._half(sizes.index_heads, sizes.index_width)
        queries = View(q.ptr, (1, sizes.index_heads, sizes.index_width), "bf16")
        weights = self._arena.put(self._rng.standard_normal((1, sizes.index_heads)).astype(np.float32), "f32")
        caches = self._arena.put(np.full(1, place.ptr, np.int64), "i64")
        counts = self._arena.put(np.full(1, positions, np.int32), "i32")
        scores, rows, num = take((1, positions), "f32"), take((1, sizes.top_k), "i32"), take((1,), "i32")

        def score(n: int) -> None:
            index_scores(device.launcher, queries, weights, caches, 0, "bf16", counts, 0.1, 1.0, scores)

        def choose(n: int) -> None:
            select_top(device.launcher, scores, counts, rows, num)

        self._add(f"index scores of {positions} positions", score, keys.nbytes, 0)
        self._add(f"best {sizes.top_k} of {positions}", choose, 4 * positions, 0)
        best = np.sort(np.argsort(-to_host(device, scores)[0], kind="stable")[: sizes.top_k])
        if not np.array_equal(to_host(device, rows)[0], best):
            self.failures.append("the best positions are not those with the largest scores")

    def router(self) -> None:
        """The router of one token."""
        sizes, device = self.sizes, self.device
        take, num_experts = self._fresh(), 4 * sizes.num_experts
        gate = self._arena.put(self._rng.standard_normal((num_experts, sizes.hidden)).astype(np.float32), "f32")
        bias = self._arena.put(np.zeros(num_experts, np.float32), "f32")
        # small, so that no two sigmoids are 1
        x = self._rng.standard_normal((1, sizes.hidden)).astype(np.float32) * np.float32(sizes.hidden**-0.5)
        x = self._arena.put(x, "f32")
        parts = take((num_parts(sizes.hidden), 1, num_experts), "f32")
        ids, weights = take((1, sizes.experts_per_tok), "i32"), take((1, sizes.experts_per_tok), "f32")

        def work(n: int) -> None:
            route(device.launcher, x, gate, bias, 1, 1, True, 2.5, parts, ids, weights)

        self._add("router, 1 row", work, gate.nbytes, 0)
        order = np.argsort(-(to_host(device, gate) @ to_host(device, x)[0]), kind="stable")
        if sorted(to_host(device, ids)[0].tolist()) != sorted(order[: sizes.experts_per_tok].tolist()):
            self.failures.append("the router does not choose the experts with the largest logits")

    def best(self) -> None:
        """The best token of a row of logits."""
        device, take, vocab_size = self.device, self._fresh(), 154880
        host = self._rng.standard_normal((4, vocab_size), np.float32)
        logits, blocks = self._arena.put(host, "f32"), num_blocks(vocab_size)
        values, block_ids, ids = take((4, blocks), "f32"), take((4, blocks), "i32"), take((4,), "i32")

        def work(n: int) -> None:
            argmax(device.launcher, logits, values, block_ids, ids)

        self._add("best token, 4 rows", work, host.nbytes, 0)
        if not np.array_equal(to_host(device, ids), host.argmax(axis=1)):
            self.failures.append("the best tokens are not those with the largest logits")

    def _add(self, name: str, work: Callable[[int], None], num_bytes: int, flops: int) -> None:
        seconds = self._timer.samples(work)
        kind, _, rows = name.rpartition(", ")
        self._one_row_s.setdefault(kind, min(seconds))
        more = {"ms": 1e3 * min(seconds), "to_one_row": min(seconds) / self._one_row_s[kind]}
        if rows in ("64 rows", "512 rows"):
            self.part.add(name, [flops / s / 1e12 for s in seconds], "TFLOP/s", self._flops, **more)
        else:
            self.part.add(name, [num_bytes / s / 1e9 for s in seconds], "GB/s", self._memory, **more)

    def _compare(self, name: str, found: np.ndarray, expected: np.ndarray) -> None:
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error < 0.02:  # four times bf16's rounding of inputs, of hidden values and of results
            self.failures.append(f"{name}: off by {error:.2g} of the largest value, expected less than 0.02")

    def _fresh(self) -> Callable[..., View]:
        self._arena.cut(self._marked)
        return self._arena.take

    def _half(self, num_rows: int, width: int) -> View:
        values = self._rng.standard_normal((num_rows, width), np.float32)
        return self._arena.put(f32_to_bf16(values), "bf16")

    def _matrix(self, shape: tuple[int, int]) -> QuantizedMatrix:
        format = self._layout.format
        data = self._rng.integers(0, 256, (shape[0], format.row_bytes(shape[1])), np.uint8)
        scales = self._rng.uniform(0.5, 1.5, (shape[0], format.num_groups(shape[1]))).astype(np.float32)
        return QuantizedMatrix(format, shape, data, scales * np.float32(shape[1] ** -0.5 / 4))

    def _slab(self, layout: SlabLayout) -> np.ndarray:
        slab = np.empty(layout.nbytes, NUMPY_DTYPES["u8"])
        for view in layout.views(slab):
            made = self._matrix(view.shape)
            view.data[...], view.scales[...] = made.data, made.scales
        return slab


def _unsplit(x: np.ndarray) -> np.ndarray:
    """Quarter-split columns in their plain order."""
    return x.reshape(*x.shape[:-1], 4, -1).swapaxes(-1, -2).reshape(x.shape)
