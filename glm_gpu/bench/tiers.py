"""`glm-gpu bench tiers`: the same tokens with less and less memory for experts, against the disk and the best policy.

Experts are read past the page cache. Beside each budget the disk is measured, experts at random as in `bench io`: the
limit of a row is what the bytes that its tokens read take at that rate, or memory's where nothing is read. The hit rate
is held against the optimum that knows the future, replayed on the recorded routing; both begin with full memory.
"""

import statistics
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.bench.decode import bytes_per_token, filled, step_seconds
from glm_gpu.bench.measurement import Limit, Part, model_part, seconds
from glm_gpu.bench.reads import expert_runs, shard_bytes
from glm_gpu.cache import KVCache
from glm_gpu.engine import Engine
from glm_gpu.errors import CapacityError
from glm_gpu.kernels.limits import read_bytes_s
from glm_gpu.machine import anon_rss_bytes
from glm_gpu.opening import EngineOptions
from glm_gpu.tiers.files import Run
from glm_gpu.tiers.read_bench import read_rate
from glm_gpu.tiers.replay import Clairvoyant
from glm_gpu.tiers.replay import replay as replay_trace
from glm_gpu.tiers.sizes import model_sizes
from glm_gpu.tiers.trace import Routing, Trace, read_trace
from glm_gpu.units import format_bytes

SHARES = (0.5, 0.25, 0.125)
REPEATS, TOKENS, WARM_TOKENS = 3, 8, 6
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Rung:
    """What decoding with one budget came to, median over the repeats where there are several.

    Attributes:
        step_s: seconds a token, of each repeat.
        read_bytes: bytes read a token.
        wait_s: seconds a token that a pass stood still for reads.
        hit_rate, best_hit_rate: of the whole run, and of the optimum on it.
        disk_gb_s: the disk's own, the better of just before and just after each repeat.
        refused: why the file system refuses reads past its cache; `disk_gb_s` is then memory's.
    """

    step_s: list[float]
    read_bytes: float
    wait_s: float
    hit_rate: float
    best_hit_rate: float
    disk_gb_s: float
    refused: str | None


def measure_tiers(path: Path, threads: int | None = None, is_quick: bool = False) -> Part:
    """The ladder of budgets, and what a process holds that may hold a quarter.

    Raises:
        CapacityError, CheckpointError, UnsupportedModelError, RequestError: as opening the model does, or experts do
            not lie in runs.
    """
    repeats, shares, num_tokens = (2, SHARES[1:2], 4) if is_quick else (REPEATS, SHARES, TOKENS)
    part, runs = model_part("tiers", path), expert_runs(path)
    budget = _keep_budget(part, path, threads, runs, repeats, num_tokens)  # first, while the process holds nothing else
    resident_s, most = _resident(part, path, threads, repeats, num_tokens, len(runs))
    for share in (share for share in ([] if resident_s else [most]) + list(shares) if share <= most):
        slots = max(1, int(share * len(runs)))
        options = EngineOptions(threads=threads, context=64, speculate="off", read="direct", expert_slots=slots)
        rung = climb(path, options, runs, repeats, num_tokens)
        _add_rung(part, f"{share:.3g} of the experts in memory", rung, resident_s, share)
    if budget is not None:
        ram, peak, rung = budget
        _add_rung(part, f"--ram {format_bytes(ram)}, a quarter of the model", rung, resident_s, 0.25)
        part.rows[-1].more.update(ram_bytes=ram, peak_anonymous_bytes=peak)
    return part


def _resident(
    part: Part, path: Path, threads: int | None, repeats: int, num_tokens: int, num_experts: int
) -> tuple[float | None, float]:
    """Add the row of all experts in memory: (seconds a token, 1), or (None, the share that fits) and a note."""
    with filled(path, threads, 64) as (engine, note):
        if note is not None:
            part.notes.append(note)
            return None, sum(engine.plan.num_slots.values()) / num_experts
        touched = bytes_per_token(model_sizes(engine.checkpoint, EngineOptions().recipe, False))
        before = read_bytes_s(MEMORY_BYTES)
        steps = [statistics.mean(step_seconds(engine, 0, num_tokens, seed)) for seed in range(repeats)]
        bandwidth = (before + read_bytes_s(MEMORY_BYTES)) / 2
    limit = Limit(bandwidth / touched, f"memory read at {bandwidth / 1e9:.1f} GB/s")
    part.add("all experts in memory", (1 / s for s in steps), "tok/s", limit, share_of_experts=1.0,
             hit_rate=1.0, best_hit_rate=1.0, read_bytes_per_token=0.0)  # fmt: skip
    return statistics.median(steps), 1.0


def climb(path: Path, options: EngineOptions, runs: list[Run], repeats: int, num_tokens: int) -> Rung:
    """Decode with a budget."""
    steps, reads, waits, disk = [], [], [], []
    rng = np.random.default_rng(0)
    order = [runs[n] for n in rng.permutation(len(runs))]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        with Engine.open(path, replace(options, trace=trace)) as engine:
            store = engine.store
            cache = engine.model.new_cache(WARM_TOKENS + repeats * num_tokens, is_bf16=True)
            decode(engine, cache, rng, WARM_TOKENS)  # the background reads of the start
            for _ in range(repeats):
                before, refused = _disk_rate(order, options.read_threads)
                bytes_before, wait_before = store.files.bytes_read, store.counters.wait_s
                steps.append(seconds(lambda: decode(engine, cache, rng, num_tokens)) / num_tokens)
                reads.append((store.files.bytes_read - bytes_before) / num_tokens)
                waits.append((store.counters.wait_s - wait_before) / num_tokens)
                disk.append(max(before, _disk_rate(order, options.read_threads)[0]))
            capacity = sum(num * size for size, num in engine.plan.num_slots.items())
            hit_rate = store.counters.phases["decode"].hit_rate
        recorded = beginning_full(read_trace(trace))
        best = replay_trace(recorded, Clairvoyant(recorded), capacity).hit_rate("decode")
    medians = (statistics.median(values) for values in (reads, waits))
    return Rung(steps, *medians, hit_rate, best, statistics.median(disk), refused)


def _disk_rate(order: list[Run], num_threads: int) -> tuple[float, str | None]:
    """GB/s of experts read past the page cache, or through it, and then why they had to be."""
    try:
        return read_rate(order, "direct", num_threads, 0.5), None
    except OSError as error:
        return read_rate(order, "buffered", num_threads, 0.5), error.strerror


def beginning_full(trace: Trace) -> Trace:
    """The trace behind a prompt that used every expert once: memory then begins with what will be used first."""
    everything = np.arange(trace.header.num_experts)[None]
    layers = [layer for layer, nbytes in enumerate(trace.header.slab_nbytes) if nbytes]
    return replace(trace, routings=[*(Routing("prefill", layer, everything) for layer in layers), *trace.routings])


def decode(engine: Engine, cache: KVCache, rng: np.random.Generator, num_tokens: int) -> None:
    """Run random tokens one by one behind what the cache holds."""
    for token in rng.integers(0, engine.config.vocab_size, num_tokens):
        engine.model.forward(Batch.of([([int(token)], cache)], "decode"))


def _add_rung(part: Part, name: str, rung: Rung, resident_s: float | None, share: float) -> None:
    """The limit: what reading a token's bytes takes at the disk's own rate, beside all of its computing."""
    step_s = statistics.median(rung.step_s)
    reading_s = rung.read_bytes / rung.disk_gb_s / 1e9
    limit, more = None, {}
    if rung.refused is None:
        limit = Limit(1 / max(reading_s, resident_s or 0), f"disk at {rung.disk_gb_s:.2f} GB/s, or computing")
    elif not any("page cache" in note for note in part.notes):
        part.notes.append(f"reads past the page cache are refused here ({rung.refused}): no row tells about the disk")
    if resident_s:
        # computing and reading one after the other would take so long; what was saved was done at once
        hidden = (resident_s + reading_s - step_s) / resident_s
        more["computing_hidden"] = max(0.0, min(1.0, hidden))
    part.add(
        name, (1 / s for s in rung.step_s), "tok/s", limit,
        share_of_experts=share, hit_rate=rung.hit_rate, best_hit_rate=rung.best_hit_rate,
        read_bytes_per_token=rung.read_bytes, read_gb_s=rung.read_bytes / step_s / 1e9, disk_gb_s=rung.disk_gb_s,
        wait_share=rung.wait_s / step_s, is_disk=rung.refused is None, **more,
    )  # fmt: skip


def _keep_budget(
    part: Part, path: Path, threads: int | None, runs: list[Run], repeats: int, num_tokens: int
) -> tuple[int, int, Rung] | None:
    """Decode with `--ram` at a quarter of the model: (bytes allowed, most bytes held, what it came to)."""
    ram = shard_bytes(path) // 4
    options = EngineOptions(threads=threads, context=64, speculate="off", read="direct", ram=ram)
    try:
        with PeakMemory() as memory:
            rung = climb(path, options, runs, repeats, num_tokens)
    except CapacityError as error:
        part.notes.append(f"no row for a quarter of the memory: {error}")
        return None
    return ram, memory.peak_bytes, rung


class PeakMemory:
    """Samples this process's anonymous memory inside a `with`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_stopped.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, anon_rss_bytes() or 0)
