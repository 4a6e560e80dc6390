"""Predicted against measured: a slice of GLM-5.2 with all, half and a tenth of its experts in memory.

Rates are measured in the same run: the kernels' on random experts of the slice's shape, the disk's on its files just
before and after each budget. Routing is that of another text, recorded with everything in memory.

    python bench/make_slice.py --out slice --layers 4 --experts 96
    python bench/predict.py slice

One row a budget, a JSON file and a plot in bench/results.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import record

from glm_gpu.batch import Batch
from glm_gpu.bench.reads import expert_runs
from glm_gpu.engine import Engine
from glm_gpu.opening import EngineOptions
from glm_gpu.predict.cost import HOST, PlaceRates, Rates, passes_cost
from glm_gpu.predict.measure import measure_host
from glm_gpu.predict.parts import model_parts
from glm_gpu.predict.prediction import Conversation, Prediction, predict, visits_of
from glm_gpu.slab import SlabLayout
from glm_gpu.tiers.files import Run
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.read_bench import read_rate
from glm_gpu.tiers.sizes import model_sizes
from glm_gpu.tiers.trace import Routing, Trace, read_trace

WARM_TOKENS = 16
PROMPT = 512
ROUNDS = 3
# Shares of all experts that have a slot.
BUDGETS = {"resident": 1.0, "half": 0.5, "disk-bound": 0.1}


def decode(engine: Engine, num_tokens: int, seed: int) -> float:
    """Seconds for so many tokens after a warm-up."""
    cache = engine.model.new_cache(num_tokens + WARM_TOKENS, is_bf16=True)
    ids = np.random.default_rng(seed).integers(0, engine.config.vocab_size, num_tokens + WARM_TOKENS)
    for place, token in enumerate(ids):
        if place == WARM_TOKENS:
            began = time.perf_counter()
        engine.model.forward(Batch.of([([int(token)], cache)], "decode"))
    return time.perf_counter() - began


def wait_until_filled(engine: Engine) -> None:
    """Until background reads have filled the slots."""
    num_slots = sum(engine.plan.num_slots.values())
    while sum(tier.num_experts for tier in engine.store.report() if tier.name != "disk") < num_slots:
        engine.store.begin_pass("prefill")
        time.sleep(0.05)


def recorded(slice_path: Path, num_tokens: int) -> Trace:
    """The routing of another text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slice.trace"
        with Engine.open(slice_path, EngineOptions(context=256, speculate="off", trace=path)) as engine:
            decode(engine, num_tokens, seed=1000)
        return read_trace(path)


def measured_rates(order: list[Run], layout: SlabLayout, read_threads: int) -> Rates:
    """This machine's rates now: kernels, and reads in random order."""
    many, alone = (read_rate(order, "direct", depth, 0.5) for depth in (read_threads, 1))
    best = max(many, alone)
    return Rates(measure_host(layout, "int16"), best, layout.nbytes / alone / 1e9 - layout.nbytes / best / 1e9)


def mean_rates(before: Rates, after: Rates) -> Rates:
    def mean(of: Callable[[Rates], float]) -> float:
        return (of(before) + of(after)) / 2

    host = PlaceRates(
        mean(lambda r: r.host.weights_gb_s),
        mean(lambda r: r.host.gmac_s),
        before.host.layer_s,
        mean(lambda r: r.host.dense_gb_s),
        mean(lambda r: r.host.dense_gmac_s),
    )
    return Rates(host, mean(lambda r: r.disk_gb_s), mean(lambda r: r.read_s))


def conversation(trace: Trace) -> Conversation:
    """The recorded text, its first tokens as a warm-up whose time does not count."""
    per_token = len({routing.layer for routing in trace.routings})
    found = [
        Routing("prefill" if index < WARM_TOKENS * per_token else "decode", routing.layer, routing.ids)
        for index, routing in enumerate(trace.routings)
    ]
    return Conversation(Heat(trace.header.num_layers, trace.header.num_experts), found)


def describe(prediction: Prediction) -> dict:
    return {
        "tok_s": prediction.tok_s,
        "hit_rate": prediction.hit_rate,
        "bottleneck": prediction.decode.bottleneck,
        "phases_ms": {name: seconds * 1e3 for name, seconds in prediction.decode.phases.items() if seconds},
    }


def row(args: argparse.Namespace, name: str, runs: list[Run], trace: Trace) -> dict:
    slots = max(8, round(BUDGETS[name] * len(runs)))
    options = EngineOptions(context=256, speculate="off", expert_slots=slots, read="direct", prefetch=args.prefetch)
    with Engine.open(args.slice, options) as engine:
        wait_until_filled(engine)
        layout = engine.store.layout(engine.store.files.layers[0])
        order = [runs[n] for n in np.random.default_rng(0).permutation(len(runs))]
        before = measured_rates(order, layout, options.read_threads)
        counters = engine.store.counters.phases["decode"]
        walls = [decode(engine, args.tokens, seed) for seed in range(ROUNDS)]
        after = measured_rates(order, layout, options.read_threads)
        hit_rate, recall, plan = counters.hit_rate, engine.store.counters.recall, engine.plan
        sizes = model_sizes(engine.checkpoint, options.recipe, with_mtp=False)
        parts = model_parts(engine.config, options.recipe, engine.checkpoint)
    rates = mean_rates(before, after)
    predicted = predict(parts, sizes, plan, rates, conversation(trace))
    measured = args.tokens / statistics.median(walls)
    return {
        "budget": name,
        "expert_slots": slots,
        "experts": len(runs),
        "measured_tok_s": measured,
        "measured_spread": [args.tokens / max(walls), args.tokens / min(walls)],
        "measured_hit_rate": hit_rate,
        "prefetch_recall": recall,
        "kernels_gb_s": rates.host.weights_gb_s,
        "dense_gb_s": rates.host.dense_gb_s,
        "kernels_gmac_s": rates.host.gmac_s,
        "disk_gb_s": rates.disk_gb_s,
        "read_ms": rates.read_s * 1e3,
        "predicted": describe(predicted),
        "predicted_over_measured": predicted.tok_s / measured,
    }


def prompt_row(args: argparse.Namespace) -> dict:
    """A prompt with everything in memory, every expert chosen by some row."""
    options = EngineOptions(context=PROMPT + 8, speculate="off")
    with Engine.open(args.slice, options) as engine:
        wait_until_filled(engine)
        layout = engine.store.layout(engine.store.files.layers[0])
        parts = model_parts(engine.config, options.recipe, engine.checkpoint)
        before, walls = measure_host(layout, "int16"), []
        for seed in range(ROUNDS):
            ids = np.random.default_rng(seed).integers(0, engine.config.vocab_size, PROMPT).tolist()
            batch = Batch.of([(ids, engine.model.new_cache(PROMPT, is_bf16=True))], "prefill")
            began = time.perf_counter()
            engine.model.forward(batch)
            walls.append(time.perf_counter() - began)
        rates = mean_rates(Rates(before, np.inf), Rates(measure_host(layout, "int16"), np.inf))
        table = np.zeros((1, parts.num_layers, 3))
        table[0, list(engine.config.sparse_layers), 1] = engine.config.n_routed_experts
    places, visits = np.full(parts.num_layers, HOST), visits_of(table, np.array([PROMPT]))
    predicted = passes_cost(parts, rates, places, visits, PROMPT / 2, 1)
    measured_s = statistics.median(walls)
    return {
        "prompt_tokens": PROMPT,
        "measured_s": measured_s,
        "measured_spread_s": [min(walls), max(walls)],
        "kernels_gmac_s": rates.host.gmac_s,
        "dense_gmac_s": rates.host.dense_gmac_s,
        "predicted_s": predicted.seconds,
        "bottleneck": predicted.bottleneck,
        "predicted_over_measured": predicted.seconds / measured_s,
    }


def draw(rows: list[dict]) -> None:
    from plots import plot

    names = [f"{found['budget']}\n{found['expert_slots']} of {found['experts']}" for found in rows]
    places = np.arange(len(rows))
    with plot("predict", "Decode, a slice of GLM-5.2", "experts in memory", "tok/s") as axes:
        axes.bar(places - 0.2, [found["measured_tok_s"] for found in rows], 0.4, label="measured")
        axes.bar(places + 0.2, [found["predicted"]["tok_s"] for found in rows], 0.4, label="predicted")
        axes.set_xticks(places, names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured decode of a slice at several budgets.")
    parser.add_argument("slice", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prefetch", choices=["on", "off", "auto"], default="auto")
    args = parser.parse_args()
    runs = expert_runs(args.slice)
    trace = recorded(args.slice, args.tokens)
    rows = [row(args, name, runs, trace) for name in BUDGETS]
    for found in rows:
        predicted = found["predicted"]
        measured = f"measured {found['measured_tok_s']:6.2f} tok/s, hit {found['measured_hit_rate']:4.0%}"
        share = f"{found['predicted_over_measured'] - 1:+.0%}, bound by {predicted['bottleneck']}"
        print(
            f"{found['budget']:11} {found['expert_slots']:4} slots   {measured}   "
            f"predicted {predicted['tok_s']:6.2f}, {predicted['hit_rate']:4.0%} ({share})"
        )
    prompt = prompt_row(args)
    share = f"{prompt['predicted_over_measured'] - 1:+.0%}"
    print(
        f"prompt of {PROMPT}: {prompt['measured_s']:.2f} s measured, {prompt['predicted_s']:.2f} s predicted ({share})"
    )
    record.save("predict", {"rows": rows, "prompt": prompt})
    draw(rows)


if __name__ == "__main__":
    main()
