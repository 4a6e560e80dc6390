"""`glm-gpu bench decode` and `prefill`: a model in memory, against memory bandwidth and the peak of the products.

A decoded token reads every dense weight once and the chosen experts: so many bytes, at most as fast as memory was read
just before and just after. A prompt's token multiplies as many weights, at most as fast as the product instruction in
use goes.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.bench.measurement import Limit, Part, model_part, seconds
from glm_gpu.cache import KVCache
from glm_gpu.config import ModelConfig
from glm_gpu.engine import Engine
from glm_gpu.kernels.clock import timed_kernels
from glm_gpu.kernels.limits import integer_multiply_adds_s, read_bytes_s
from glm_gpu.opening import EngineOptions
from glm_gpu.pass_profile import profiled
from glm_gpu.recipe import tensor_class
from glm_gpu.tensors import expected_tensors
from glm_gpu.tiers.sizes import ModelSizes, model_sizes

REPEATS = 3
STEPS, WARM_STEPS = 24, 4
LONG_CONTEXT = 4096
PROMPTS = (32, 128, 512)
MEMORY_BYTES = 1 << 30


def measure_decode(path: Path, threads: int | None = None, is_quick: bool = False) -> Part:
    """Decode with an empty context and a long one, with all that fits in memory.

    Raises:
        GlmGpuError: the folder holds no model that runs here.
    """
    num_steps, repeats = (8, 2) if is_quick else (STEPS, REPEATS)
    part, beyond = model_part("decode", path), num_steps + WARM_STEPS
    longest = min(LONG_CONTEXT, ModelConfig.open(path).max_position_embeddings - beyond)
    with filled(path, threads, longest + beyond) as (engine, note):
        sizes = model_sizes(engine.checkpoint, EngineOptions().recipe, False)
        touched = bytes_per_token(sizes)
        for length in (0, longest):
            steps, limits = [], []
            for _ in range(repeats):
                before = read_bytes_s(MEMORY_BYTES)
                steps.append(statistics.median(step_seconds(engine, length, num_steps)))
                limits.append((before + read_bytes_s(MEMORY_BYTES)) / 2)
            bandwidth = statistics.median(limits)
            limit = Limit(bandwidth / touched, f"memory read at {bandwidth / 1e9:.1f} GB/s")
            name = "decode, empty context" if length == 0 else f"decode at {length} positions"
            part.add(name, (1 / step for step in steps), "tok/s", limit,
                     bytes_per_token=touched, memory_gb_s=bandwidth / 1e9,
                     **_shares(engine, length, num_steps))  # fmt: skip
        part.notes += [note] if note else []
        part.notes.append("the limit counts bytes of weights only; the cache of a long context comes on top")
    return part


def measure_prefill(path: Path, threads: int | None = None, is_quick: bool = False) -> Part:
    """Prompts of several lengths. Raises what `measure_decode` does."""
    repeats, prompts = (2, PROMPTS[:1]) if is_quick else (REPEATS, PROMPTS)
    part = model_part("prefill", path)
    with filled(path, threads, max(PROMPTS) + 8) as (engine, note):
        products = products_per_token(engine.config)
        rng = np.random.default_rng(0)
        for length in prompts:
            rates, limits = [], []
            for _ in range(repeats):
                ids = rng.integers(0, engine.config.vocab_size, length).tolist()
                batch = Batch.of([(ids, engine.model.new_cache(length, is_bf16=True))], "prefill")
                before = integer_multiply_adds_s()
                rates.append(length / seconds(lambda batch=batch: engine.model.forward(batch)))
                limits.append(max(before, integer_multiply_adds_s()))
            peak = max(limits)  # what the processor can do does not change; what others leave of it does
            limit = Limit(peak / products, f"int16 products at {peak / 1e9:.0f} GMAC/s")
            part.add(f"prompt of {length} tokens", rates, "tok/s", limit,
                     products_per_token=products, peak_gmac_s=peak / 1e9)  # fmt: skip
        part.notes += [note] if note else []
        part.notes.append("the limit counts products with weights only; attention's come on top")
    return part


def _shares(engine: Engine, length: int, num_steps: int) -> dict:
    """What part of a step is which; from steps of their own, since looking costs a little."""
    with profiled(engine) as phases:
        step_seconds(engine, length, num_steps, seed=1)
    phase = phases["decode"]
    shares = {name: line_s / phase.pass_s for name, line_s in phase.lines(phase.pass_s).items()}
    return {"python_share": python_share(engine, length, num_steps), "shares": shares}


def python_share(engine: Engine, length: int, num_steps: int) -> float | None:
    """Median share of a step that is spent neither in the kernels nor waiting for reads; None where NumPy computes.

    Nothing but the kernels is timed, so what the profile adds to a step does not count.
    """
    counters, found = engine.store.counters, []
    with timed_kernels() as clock:
        if clock is None:
            return None

        def elsewhere_s() -> float:
            return clock.seconds + counters.wait_s

        for step_s, not_python_s in steps_beside(engine, length, num_steps, elsewhere_s):
            found.append(1 - not_python_s / step_s)
    return statistics.median(found)


@contextmanager
def filled(path: Path, threads: int | None, context: int) -> Iterator[tuple[Engine, str | None]]:
    """An engine with as many experts in memory as fit, and a note where that is not all of them."""
    options = EngineOptions(threads=threads, context=context, speculate="off", prefetch="off")
    with Engine.open(path, options) as engine:
        slots = sum(engine.plan.num_slots.values())
        while sum(tier.num_experts for tier in engine.store.report() if tier.name != "disk") < slots:
            engine.store.begin_pass("prefill")  # lets the background reads go on
            time.sleep(0.05)
        num_experts = engine.config.n_routed_experts * len(engine.config.sparse_layers)
        yield (
            engine,
            None if slots == num_experts else f"{slots} of {num_experts} experts fit in memory: reads count too",
        )


def bytes_per_token(sizes: ModelSizes) -> float:
    """Bytes of weights that one decoded token reads; of the embedding, half of the ends, it needs a row."""
    return sum(sizes.layer_bytes) + sizes.end_bytes / 2 + sum(sizes.slab_nbytes) * sizes.experts_per_tok


def products_per_token(config: ModelConfig) -> float:
    """Multiply-adds with weights for one token of a prompt, whose logits nobody wants."""
    total = 0.0
    for name, shape in expected_tensors(config).items():
        kind = tensor_class(name, config)
        if len(shape) != 2 or kind in ("embedding", "mtp", "mtp_expert"):
            continue
        share = config.num_experts_per_tok / config.n_routed_experts if kind == "expert" else 1
        total += shape[0] * shape[1] * share
    return total


def step_seconds(engine: Engine, length: int, num_steps: int, seed: int = 0) -> list[float]:
    """Seconds of each step behind so many positions of random rows."""
    return [step_s for step_s, _ in steps_beside(engine, length, num_steps, lambda: 0.0, seed)]


def steps_beside(
    engine: Engine, length: int, num_steps: int, counted: Callable[[], float], seed: int = 0
) -> list[tuple[float, float]]:
    """Seconds of each step behind so many positions of random rows, and what something counted meanwhile."""
    rng = np.random.default_rng(seed)
    cache = filled_cache(engine, length, length + num_steps + WARM_STEPS, rng)
    found = []
    for token in rng.integers(0, engine.config.vocab_size, num_steps + WARM_STEPS):
        batch, before = Batch.of([([int(token)], cache)], "decode"), counted()
        step_s = seconds(lambda batch=batch: engine.model.forward(batch))
        found.append((step_s, counted() - before))
    return found[WARM_STEPS:]


def filled_cache(engine: Engine, length: int, max_length: int, rng: np.random.Generator) -> KVCache:
    """A cache that holds random rows: what attention takes does not depend on their values."""
    cache = engine.model.new_cache(max_length, is_bf16=True)
    for layer, streams in enumerate(cache.layout.widths):
        for name, width in streams.items():
            cache.write(layer, name, 0, rng.standard_normal((length, width), np.float32))
    cache.length = length
    return cache
