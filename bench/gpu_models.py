"""Parts of bench/gpu.py about whole models: the device against the CPU, and a slice of GLM-5.2 in different memory."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np

from glm_gpu import opening
from glm_gpu.batch import Batch
from glm_gpu.bench import slice as bench_slice
from glm_gpu.bench.measurement import Part
from glm_gpu.device import Device
from glm_gpu.device_choice import DeviceRequest
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.errors import CapacityError
from glm_gpu.opening import EngineOptions

Open = Callable[..., AbstractContextManager[list[Device]]]

ORACLE = Path(__file__).parent.parent / "tests/data/oracle"
# As in tests/test_devices.py: a logit of 16-bit activations is off by less than this share of the largest.
NOISE = 0.04
WIDTHS = {
    "f32": {"weights": "f32"},
    "16 bits": {"expert_bits": 16, "dense_bits": 16},
    "int8": {"expert_bits": 8, "dense_bits": 8},
    "int4 rows": {"expert_bits": 4, "dense_bits": 4, "group": 0},
    "int4 groups of 64": {"expert_bits": 4, "dense_bits": 4, "group": 64},
    "int4 groups of 128": {"expert_bits": 4, "dense_bits": 4, "group": 128},
    "int2": {"expert_bits": 2, "dense_bits": 2},
}


@contextlib.contextmanager
def opened(path: Path, devices: Sequence[Device], **options) -> Iterator[Engine]:
    """A model on these devices, none for the CPU."""
    found = list(devices), ""
    options = {"speculate": "off", "rounding": "rtn"} | options
    with mock.patch.object(opening, "open_devices", lambda request: found):
        engine = Engine.open(path, EngineOptions(devices=DeviceRequest("cuda" if devices else "cpu"), **options))
    with engine:
        yield engine


@contextlib.contextmanager
def without_text(path: Path) -> Iterator[Path]:
    """The same model without a tokenizer, whose package a bare machine lacks."""
    with tempfile.TemporaryDirectory() as folder:
        for file in path.iterdir():
            if file.suffix in (".safetensors", ".json") and not file.name.startswith("tokenizer"):
                (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)


def check(part: Part, open_devices: Open, is_quick: bool) -> list[str]:
    """Run small models in every format on the device and on the CPU: what differed."""
    failures = []
    cases = [(ORACLE / name, width) for name in ("tiny_olmoe", "tiny_glm") for width in WIDTHS]
    for path, width in cases[::4] if is_quick else [*cases, (DEMO_MODEL, "as stored")]:
        length, num_tokens = (20, 3) if is_quick else (40, 16)
        with without_text(path) as folder:
            options = WIDTHS.get(width, {}) | {"context": 128}
            with opened(folder, [], **options) as engine:
                expected = _logits(engine, length, num_tokens)
                ids = [*_prompt(engine, length), *expected[length - 1 :].argmax(axis=1).tolist()]
            with open_devices() as devices, opened(folder, devices, **options) as engine:
                found = _logits(engine, length, num_tokens, ids[length:])
        failure, error = _compare(found, expected)
        part.add(f"{path.name}, {width}: median error of logits", [error], "of max")
        if failure:
            failures.append(f"{path.name}, {width}: {failure}")
    return failures + _check_drafts(part, open_devices)


def _check_drafts(part: Part, open_devices: Open) -> list[str]:
    """Run the multi-token layer on the device and on the CPU over the same states: what differed."""
    options = WIDTHS["16 bits"] | {"context": 64, "speculate": "mtp"}
    with without_text(ORACLE / "tiny_glm") as folder:
        with opened(folder, [], **options) as engine:
            ids = _prompt(engine, 20)
            cache = engine.model.new_cache(engine.context, is_bf16=True)
            hidden = engine.model.forward(Batch.of([(ids, cache)], "prefill")).hidden
            expected = _guesses(engine, ids, hidden)
        with open_devices() as devices, opened(folder, devices, **options) as engine:
            found = _guesses(engine, ids, hidden)
    failure, error = _compare(found, expected)
    part.add("tiny_glm, multi-token layer: median error of logits", [error], "of max")
    return [f"tiny_glm, multi-token layer: {failure}"] if failure else []


def _guesses(engine: Engine, ids: Sequence[int], hidden: np.ndarray) -> np.ndarray:
    """Logits of what comes after the tokens behind each state."""
    cache = engine.mtp_head.new_cache(engine.context, is_bf16=True)
    return engine.mtp_head.forward(Batch.of([(ids, cache)], "prefill", all_logits=True), hidden)[0].logits


def _compare(found: np.ndarray, expected: np.ndarray) -> tuple[str, float]:
    scale = float(np.abs(expected).max())
    best = np.sort(expected, axis=1)
    is_clear = best[:, -1] - best[:, -2] > NOISE * scale
    error = float(np.median(np.abs(found - expected)) / scale)
    if not np.isfinite(found).all():
        return "logits are not finite", error
    num_wrong = int((found.argmax(axis=1) != expected.argmax(axis=1))[is_clear].sum())
    if num_wrong or error > NOISE / 4:
        return f"{num_wrong} of {int(is_clear.sum())} clear tokens differ, median error {error:.2g}", error
    return "", error


def _prompt(engine: Engine, length: int) -> list[int]:
    return np.random.default_rng(3).integers(0, engine.config.vocab_size, length).tolist()


def _logits(engine: Engine, length: int, num_tokens: int, forced: Sequence[int] = ()) -> np.ndarray:
    """Logits of a prompt and of tokens after it: its own best ones, or those given."""
    cache = engine.model.new_cache(engine.context, is_bf16=True)
    rows = [engine.model.forward(Batch.of([(_prompt(engine, length), cache)], "prefill", all_logits=True)).logits]
    for n in range(num_tokens):
        chosen = forced[n] if n < len(forced) else int(rows[-1][-1].argmax())
        rows.append(engine.model.forward(Batch.of([([chosen], cache)], "decode", all_logits=True)).logits)
    return np.concatenate(rows)


def write_slice(path: Path, is_quick: bool) -> Path:
    """A slice with few experts; the tiny oracle model stands for it where all is small."""
    if is_quick:
        return ORACLE / "tiny_olmoe"
    shape = bench_slice.SliceShape(num_layers=4, num_dense=1, num_experts=64)
    bench_slice.write_slice(path, bench_slice.glm_config(shape))
    return path


def measure_slice(part: Part, open_devices: Open, path: Path, is_quick: bool) -> list[str]:
    """Decode, verification and prefill with all experts in VRAM, half, eight a layer; on two devices of one card."""
    failures, reference = [], None
    length, num_steps = (24, 3) if is_quick else (512, 32)
    with without_text(path) as folder:
        options = {"context": 64 if is_quick else 1024, "expert_bits": 16 if is_quick else None}
        options |= {"dense_bits": 16} if is_quick else {}
        kept, slot, num_experts, layers = _needs(folder, open_devices, options)
        placements = {
            "resident": (None, 1),
            "half in VRAM": (kept + slot * num_experts // 2, 1),
            "8 experts a layer in VRAM": (kept + slot * 8 * layers, 1),
            "two devices of one card": (kept + slot * (num_experts * 3 // 4), 2),
        }
        for name, (vram, count) in placements.items():
            try:
                with open_devices(vram, count) as devices, opened(folder, devices, **options) as engine:
                    _time(part, f"slice, {name}", engine, length, num_steps)
                    logits = _logits(engine, 20, 4)
            except CapacityError as error:
                part.notes.append(f"slice, {name}: {error}")
                continue
            if reference is None:
                reference = logits
            elif not np.array_equal(logits, reference):
                failures.append(f"slice, {name}: bits differ from those with everything in VRAM")
    return failures


def _needs(path: Path, open_devices: Open, options: dict) -> tuple[int, int, int, int]:
    """Bytes beside experts, bytes of one, how many there are, and layers with them, by the plan for one device."""
    with open_devices() as devices, opened(path, devices, **options) as engine:
        (plan,) = engine.plan.devices
        ((slot, _),) = plan.num_slots.items()
        layers = len(engine.config.sparse_layers)
        reserve = engine.plan.budget.devices[0].reserve_bytes
        kept = reserve + plan.dense_bytes + plan.cache_bytes + plan.pass_bytes
        return kept, slot, layers * engine.config.n_routed_experts, layers


def _time(part: Part, name: str, engine: Engine, length: int, num_steps: int) -> None:
    layers = engine.config.num_hidden_layers
    cache = engine.model.new_cache(engine.context, is_bf16=True)
    _seconds(engine, _prompt(engine, length), cache)  # loads kernels
    cache.truncate(0)
    seconds = _seconds(engine, _prompt(engine, length), cache)
    part.add(f"{name}: prefill of {length}", [length / seconds], "tok/s", layers=layers)
    for width in (1, 4):
        times = []
        for step in range(num_steps + 4):
            ids = [(7 * step + n) % engine.config.vocab_size for n in range(width)]
            times.append(_seconds(engine, ids, cache))
            cache.truncate(length)
        phases = engine.store.counters.phases["decode"]
        part.add(
            f"{name}: pass of {width}",
            [1e3 * median(times[4:])],
            "ms",
            layers=layers,
            hit_rate=phases.hit_rate,
            num_graphs=engine.model.chains[0].num_graphs,
        )


def _seconds(engine: Engine, ids: Sequence[int], cache) -> float:
    began = time.perf_counter()
    engine.model.forward(Batch.of([(ids, cache)], "prefill" if len(ids) > 16 else "decode"))
    return time.perf_counter() - began
