"""The whole engine on simulated devices: the CPU reference's tokens, the same bits wherever everything is placed."""

import gc

import numpy as np
import pytest
from asking import ask, run
from device_models import greedy, needs, on_devices, options_for

from glm_gpu.batch import Batch
from glm_gpu.engine import Engine
from glm_gpu.errors import CapacityError
from glm_gpu.model.transformer import cache_layout
from glm_gpu.opening import EngineOptions
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.scheduler import Scheduler

# Prompt and tokens of each model: past `index_topk` where there is one, and few, since a pass takes a second.
PROMPTS = {"tiny_glm": (20, 4), "tiny_olmoe": (24, 5), None: (70, 2)}
# A logit of 16-bit activations differs from the CPU's by this share of the largest one where both choose alike.
NOISE = 0.04


def sizes_of(placement: str, path) -> tuple[int, ...]:
    """Memory of each device for a placement by name."""
    need = needs(path)
    one, all_experts = need.kept_bytes + need.pass_bytes, need.num_experts * need.slot_bytes
    return {
        "everything": (1 << 30,),
        "half": (one + all_experts // 2,),
        "few": (one + 6 * need.slot_bytes,),
        "two equal": (need.kept_bytes // 2 + need.pass_bytes + all_experts,) * 2,
        "two unequal, half": (one + all_experts // 8, one + all_experts * 3 // 8),
        "four unequal": tuple(need.kept_bytes + need.pass_bytes + n * all_experts // 8 for n in (1, 3, 1, 2)),
        "four, few": (need.kept_bytes * 3 // 4 + need.pass_bytes + 6 * need.slot_bytes,) * 4,
    }[placement]


@pytest.fixture(scope="module")
def runs(oracle_dir):
    """runs(model, placement) -> (ids, logits, engine's plan), each computed once; "cpu" is the reference."""
    known = {}

    def run(name, placement):
        if (name, placement) not in known:
            path = None if name is None else oracle_dir / name
            devices = {} if placement == "cpu" else {"devices": on_devices(*sizes_of(placement, path))}
            length, num_tokens = PROMPTS[name]
            changes = devices | {"context": max(64, length + num_tokens)}
            with Engine.open(path, options_for(path, **changes)) as engine:
                prompt_ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, length).tolist()
                known[name, placement] = *greedy(engine, prompt_ids, num_tokens), engine.plan
        return known[name, placement]

    return run


def assert_within_noise(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Logits [T, V] are the CPU's but for 16-bit noise: the same best token where its margin is larger; [T] where."""
    noise = NOISE * np.abs(expected).max()
    best = np.sort(expected, axis=1)
    is_clear = best[:, -1] - best[:, -2] > noise
    assert is_clear.mean() > 0.3
    assert (logits.argmax(axis=1) == expected.argmax(axis=1))[is_clear].all()
    assert np.median(np.abs(logits - expected)) < noise / 8
    return is_clear


@pytest.mark.parametrize("name", ["tiny_glm", "tiny_olmoe", None])
def test_tokens_are_the_cpu_s_wherever_its_margin_exceeds_16_bit_noise(runs, name):
    ids, logits, _ = runs(name, "everything")
    expected_ids, expected, _ = runs(name, "cpu")
    is_clear = assert_within_noise(logits, expected)
    if is_clear[-len(ids) :].all():
        assert ids == expected_ids


@pytest.mark.parametrize(
    "widths",
    [
        {"weights": "f32"},
        {"expert_bits": 2, "dense_bits": 2},
        {"expert_bits": 8, "dense_bits": 4, "group": 0},
        {"expert_bits": 4, "dense_bits": 8, "group": 128},
    ],
    ids=lambda widths: " ".join(map(str, widths.values())),
)
@pytest.mark.parametrize("name", ["tiny_glm", "tiny_olmoe"])
def test_every_format_of_the_cpu_runs_on_two_devices(oracle_dir, name, widths):
    options = {"context": 64, "speculate": "off", "rounding": "rtn"} | widths
    with Engine.open(oracle_dir / name, EngineOptions(**options)) as engine:
        prompt_ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, 20).tolist()
        _, expected = greedy(engine, prompt_ids, 1)
    with Engine.open(oracle_dir / name, EngineOptions(**options, devices=on_devices(1 << 26, 1 << 26))) as engine:
        assert all(device.layers for device in engine.plan.devices)
        _, logits = greedy(engine, prompt_ids, 1)
    assert_within_noise(logits, expected)


@pytest.mark.parametrize("placement", ["half", "few", "two equal", "two unequal, half", "four unequal", "four, few"])
@pytest.mark.parametrize("name", ["tiny_glm", "tiny_olmoe"])
def test_bits_are_the_same_wherever_experts_and_layers_are(runs, name, placement):
    ids, logits, _ = runs(name, "everything")
    found_ids, found, _ = runs(name, placement)
    assert found_ids == ids
    assert np.array_equal(found, logits)


@pytest.mark.parametrize("eager", ["", "copy", "compute", "copy compute"])
@pytest.mark.parametrize("placement", ["few", "two unequal, half"])
def test_bits_do_not_depend_on_which_stream_runs_ahead_nor_on_guesses(runs, oracle_dir, placement, eager):
    _, logits, _ = runs("tiny_olmoe", "everything")
    path, (length, num_tokens) = oracle_dir / "tiny_olmoe", PROMPTS["tiny_olmoe"]
    options = options_for(path, devices=on_devices(*sizes_of(placement, path)), prefetch="on")
    with Engine.open(path, options) as engine:
        engine.store._links = None  # so that experts are copied
        for device in engine.devices:
            for name in eager.split():
                getattr(device, name).is_eager = True
        prompt_ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, length).tolist()
        assert np.array_equal(greedy(engine, prompt_ids, num_tokens)[1], logits)
        counters = engine.store.counters
        assert counters.recall > 0.3 and (counters.copied_ahead > 0 or placement != "few")


def test_c26_a_prompt_as_long_as_the_context_fits_beside_experts_that_fill_the_memory(oracle_dir):
    path = oracle_dir / "tiny_olmoe"
    need = needs(path)
    devices = on_devices(need.kept_bytes + need.pass_bytes + 9 * need.slot_bytes)
    with Engine.open(path, options_for(path, devices=devices)) as engine:
        (device,) = engine.devices
        assert sum(engine.plan.devices[0].num_slots.values()) == 9
        assert device.memory()[0] < need.slot_bytes
        prompt_ids = [n % engine.config.vocab_size for n in range(engine.context - 1)]
        ids, logits = greedy(engine, prompt_ids, 2)
        assert np.isfinite(logits).all() and len(ids) == 2
        assert all(part.workspace.arena.peak_bytes <= part.workspace.arena.num_bytes for part in engine.model.parts)


def opened(oracle_dir, num_slots: int, name: str = "tiny_olmoe") -> Engine:
    path = oracle_dir / name
    need = needs(path)
    sizes = need.kept_bytes + need.pass_bytes + num_slots * need.slot_bytes
    return Engine.open(path, options_for(path, devices=on_devices(sizes)))


@pytest.mark.parametrize("launch", [1, 40, 95])
def test_c26_a_launch_without_memory_gives_slots_back_and_repeats_the_pass(oracle_dir, caplog, monkeypatch, launch):
    monkeypatch.setattr("glm_gpu.tiers.vram.BLOCK_BYTES", 1)
    monkeypatch.setattr("glm_gpu.model.device_transformer.GIVE_BACK_BYTES", 100_000)
    with opened(oracle_dir, 30) as engine:
        expected, _ = greedy(engine, range(20), 3)
    with opened(oracle_dir, 30) as engine:
        (device,) = engine.devices
        free_bytes, _ = device.memory()
        device.launcher.fail_at = {launch}
        assert greedy(engine, range(20), 3)[0] == expected
        assert device.memory()[0] - free_bytes >= 100_000
        assert np.array_equal(greedy_again(engine), greedy_again(engine))
    assert sum("given back" in record.getMessage() for record in caplog.records) == 1


def greedy_again(engine: Engine) -> np.ndarray:
    return greedy(engine, range(20), 3)[1]


def test_c26_memory_that_is_short_twice_ends_one_request_and_the_engine_lives(oracle_dir):
    with opened(oracle_dir, 30) as engine:
        expected = greedy_again(engine)
        (device,) = engine.devices
        device.launcher.fail_at = {device.launcher.num_launches + n for n in (5, 10)}
        cache = engine.model.new_cache(engine.context, is_bf16=True)
        with pytest.raises(CapacityError, match="no memory"):
            engine.model.forward(Batch.of([(range(20), cache)], "prefill"))
        assert cache.length == 0
        del cache
        gc.collect()  # the error's frames held it
        assert np.array_equal(greedy_again(engine), expected)


def test_experts_that_do_not_fit_beside_the_rest_are_one_line_with_the_numbers(oracle_dir):
    path = oracle_dir / "tiny_olmoe"
    need = needs(path)
    devices = on_devices(need.kept_bytes + need.pass_bytes + need.slot_bytes)
    with pytest.raises(CapacityError, match="the GPUs cannot hold") as caught:
        Engine.open(path, options_for(path, devices=devices))
    assert "\n" not in str(caught.value) and "--context" in str(caught.value)


def test_a_host_waits_at_most_once_a_layer_and_never_where_all_is_at_hand(oracle_dir):
    with opened(oracle_dir, 36) as engine:
        greedy(engine, range(20), 3)
        (device,) = engine.devices
        cache = engine.model.new_cache(engine.context, is_bf16=True)
        for _ in range(4):
            engine.model.forward(Batch.of([([1], cache)], "decode"))
        waits = device.num_host_waits
        engine.model.forward(Batch.of([([1], cache)], "decode"))
        assert device.num_host_waits - waits == 2  # the results, and the choices to count
    with opened(oracle_dir, 8) as engine:
        engine.store._links = None
        greedy(engine, range(20), 3)
        (device,) = engine.devices
        cache = engine.model.new_cache(engine.context, is_bf16=True)
        waits = device.num_host_waits
        engine.model.forward(Batch.of([([1], cache)], "decode"))
        settled = 5  # copies of the pass before, at its beginning
        assert device.num_host_waits - waits <= settled + len(engine.config.sparse_layers) + 1


def test_a_pass_is_replayed_with_new_numbers_from_the_second_time_on(oracle_dir):
    with opened(oracle_dir, 36) as engine:
        _, logits = greedy(engine, range(20), 6)
        (chain,) = engine.model.chains
        assert chain.num_graphs == 1
        chain._captured = lambda shape, feeds: None
        assert np.array_equal(greedy(engine, range(20), 6)[1], logits)


@pytest.mark.parametrize(
    ("name", "num_slots"), [("tiny_olmoe", 36), ("tiny_olmoe", 8), ("tiny_glm", 64), ("tiny_glm", None)]
)
def test_a_row_has_the_same_bits_alone_and_among_drafts(oracle_dir, name, num_slots):
    """On one device with so many slots, or on two that hold everything."""
    path = oracle_dir / name
    options = options_for(path, devices=on_devices(1 << 26, 1 << 26))
    with Engine.open(path, options) if num_slots is None else opened(oracle_dir, num_slots, name) as engine:
        ids = [5, 9, 2, 7, 1]
        cache = engine.model.new_cache(engine.context, is_bf16=True)
        engine.model.forward(Batch.of([(range(6), cache)], "prefill"))
        together = [engine.model.forward(Batch.of([(ids, cache)], "decode", all_logits=True)).logits]
        for _ in range(2):  # eager, and where all is at hand the graph
            cache.truncate(6)
            together.append(engine.model.forward(Batch.of([(ids, cache)], "decode", all_logits=True)).logits)
        cache.truncate(6)
        alone = [engine.model.forward(Batch.of([([i], cache)], "decode")).logits[0] for i in ids]
        assert all(np.array_equal(rows, alone) for rows in together)


def test_a_prompt_reads_each_missing_expert_once_a_chunk(oracle_dir):
    with opened(oracle_dir, 8) as engine:
        (device,) = engine.devices
        loaded = device.loaded_bytes
        cache = engine.model.new_cache(engine.context, is_bf16=True)
        engine.model.forward(Batch.of([(range(40), cache)], "prefill"))
        slab_bytes = engine.store.layout(0).nbytes
        assert (device.loaded_bytes - loaded) // slab_bytes <= 36


@pytest.mark.parametrize("sizes", [(1 << 30,), (1 << 26, 1 << 26)])
def test_sequences_share_passes_on_devices_and_come_back_from_the_host_s_pages(oracle_dir, sizes):
    path = oracle_dir / "tiny_olmoe"
    options = options_for(path, devices=on_devices(*sizes), num_contexts=2)
    with Engine.open(path, options) as engine:
        assert len(engine.model.parts) == len(sizes)
        pool = PagePool(cache_layout(engine.config, True), 4 * engine.context)
        prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
        alone = []
        for ids in prompts:
            cache = engine.model.new_cache(engine.context, is_bf16=True)
            alone.append(engine.model.forward(Batch.of([(ids, cache)], "prefill")).logits[0])
        caches = [PagedCache(pool, engine.context) for _ in prompts]
        for cache in caches:
            cache.grow(16)
        first = engine.model.forward(Batch.of(list(zip(prompts[:2], caches[:2], strict=True)), "prefill")).logits
        third = engine.model.forward(Batch.of([(prompts[2], caches[2])], "prefill")).logits
        assert np.array_equal(np.concatenate([first, third]), alone)
        # the third sequence pushed one out of the devices: its rows come back from the pages
        again = engine.model.forward(Batch.of([([10], caches[0]), ([11], caches[1])], "decode")).logits
        assert [cache.length for cache in caches] == [5, 3, 3]
        del cache
        caches.clear()
        fresh = engine.model.new_cache(engine.context, is_bf16=True)
        expected = engine.model.forward(Batch.of([([*prompts[0], 10], fresh)], "prefill")).logits[0]
        assert np.array_equal(again[0], expected)
        pool.close()


def test_a_server_s_requests_get_the_answers_they_would_get_alone(oracle_dir):
    path = oracle_dir / "tiny_olmoe"
    options = options_for(path, devices=on_devices(1 << 26, 1 << 26), num_contexts=2, is_shared=True)
    with Engine.open(path, options) as engine:
        pool = PagePool(cache_layout(engine.config, True), 4 * engine.context)
        scheduler = Scheduler(engine.model, pool, engine.context, max_running=2, max_rows=16)
        prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [3, 1, 4, 1, 5, 9]]
        together = [answer.ids for answer in run(scheduler, *(ask(ids, 3) for ids in prompts))]
        assert together == [run(scheduler, ask(ids, 3))[0].ids for ids in prompts]
        engine.devices[0].launcher.fail_at = {engine.devices[0].launcher.num_launches + n for n in (3, 6)}
        answers = run(scheduler, ask([7, 7], 3), ask(prompts[0], 3))  # their pass fails twice; then each runs alone
        assert [answer.result.finish_reason for answer in answers] == ["length", "length"]
        assert answers[1].ids == together[0] and scheduler.counts.retried == 1
        scheduler.tree.clear()
        assert pool.num_free == pool.num_pages
        pool.close()
