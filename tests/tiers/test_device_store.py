"""VRAM as a tier, on simulated devices: which bytes kernels find where, and what gives way to what."""

import ctypes

import numpy as np
import pytest
from waiting import LONG_S

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.device import DeviceMemoryError
from glm_gpu.device_sim import SimDevice
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.device_store import DeviceStore
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.link import LinkRates, reads_in_place
from glm_gpu.tiers.store import REVIEW_PASSES
from glm_gpu.tiers.vram_tier import VramTier


class Bench:
    """A store over one simulated device for two layers of a model, and what its kernels would see.

    Args:
        num_slots, num_transit, num_host: slots in VRAM, of them for transit, and in RAM.
    """

    def __init__(self, path, num_slots, num_transit=0, num_host=8, heat=None, links=None) -> None:
        checkpoint = Checkpoint.open(path)
        recipe, config = Recipe.from_bits(16, 16, 64), checkpoint.config
        self.layers = list(config.sparse_layers)[:2]
        self.files = ExpertFiles(checkpoint, recipe, self.layers)
        self.num_experts = config.n_routed_experts
        self.heat = heat or Heat(config.num_hidden_layers + 1, self.num_experts)
        self.device = SimDevice(0, 1 << 24)
        size = self.files.layout(self.layers[0]).aligned_nbytes
        is_elsewhere = np.zeros(self.heat.shape, bool)
        layouts = {layer: self.files.layout(layer) for layer in self.layers}
        self.tier = VramTier(self.device, layouts, {size: num_slots}, {size: num_transit}, self.heat, is_elsewhere)
        self.store = DeviceStore(
            self.files, {size: num_host}, self.heat, [self.tier], links=links, is_elsewhere=is_elsewhere
        )
        self.seen: list[list[int]] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exception: object) -> None:
        self.store.close()

    def expert(self, layer: int, expert: int) -> bytes:
        """As the checkpoint has it."""
        slab = np.empty(self.files.layout(layer).aligned_nbytes, np.uint8)
        self.files.read(layer, expert, slab)
        return slab[: self.files.layout(layer).nbytes].tobytes()

    def compute(self, layer: int):
        """Stands for the kernels: every address of a table must lead to its expert's bytes."""

        def look(table) -> None:
            row = np.frombuffer(ctypes.string_at(table.ptr, table.nbytes), np.int64)
            for expert in np.flatnonzero(row):
                assert ctypes.string_at(int(row[expert]), self.files.layout(layer).nbytes) == self.expert(layer, expert)
            self.seen.append(np.flatnonzero(row).tolist())

        return lambda table: self.device.compute.queue(lambda: look(table))

    def run(self, layer: int, choices, phase="decode", guess=None) -> list[list[int]]:
        """A layer of a pass: what its kernels found at once, then each part."""
        self.seen = []
        self.compute(layer)(self.tier.table.row(layer))
        self.device.compute.record().synchronize()  # as a pass waits for the router's choice
        num_decode = len(choices) if phase == "decode" else 0
        self.store.compute_missing(layer, np.array(choices, np.int32), num_decode, self.compute(layer), guess)
        self.device.compute.synchronize()
        return self.seen

    def missing(self, layer: int) -> list[int]:
        """Experts of a layer that are not in VRAM."""
        return [expert for expert in range(self.num_experts) if not self.tier.table.address(layer, expert)]

    def bring_to_host(self, layer: int, experts: list[int], num_uses: int = 40) -> None:
        """Have experts in the host's slots, and hot."""
        for _ in range(num_uses):
            self.store.count(layer, np.array([experts] * 2), 2)
        with self.store.lease(layer, np.array(experts), len(experts)) as lease:
            assert sum(len(members) for members, _ in lease.parts()) == len(experts)


@pytest.fixture
def open_bench(oracle_dir):
    def make(*args, **kwargs) -> Bench:
        return Bench(oracle_dir / "tiny_olmoe", *args, **kwargs)

    return make


def some_heat(shape, layer: int, hot: list[int]) -> Heat:
    heat = Heat(*shape)
    for _ in range(50):
        heat.count(layer, np.array([hot]), "decode")
    return heat


def test_the_hottest_experts_are_in_vram_from_the_beginning(open_bench):
    with open_bench(4) as probe:
        shape, (first, second) = probe.heat.shape, probe.layers
    with open_bench(4, heat=some_heat(shape, second, [5, 2, 7])) as bench:
        assert {5, 2, 7} <= set(np.flatnonzero([bench.tier.table.address(second, e) for e in range(bench.num_experts)]))
        assert bench.store.tier_map()[second][[5, 2, 7]].tolist() == [3, 3, 3]
        (seen,) = bench.run(second, [[5, 2]])
        assert {5, 2, 7} <= set(seen)
        assert bench.store.counters.phases["decode"].vram == 2
        assert first != second


@pytest.mark.parametrize(("num_slots", "num_transit"), [(2, 0), (3, 0), (5, 2), (8, 4), (16, 0)])
def test_kernels_find_every_expert_chosen_and_its_own_bytes(open_bench, monkeypatch, num_slots, num_transit):
    monkeypatch.setattr("glm_gpu.tiers.vram_tier.HYSTERESIS", 0.0)  # so that guesses find slots
    rng = np.random.default_rng(1)
    with open_bench(num_slots, num_transit) as bench:
        for number in range(12):
            phase, num_rows = ("prefill", 20) if number % 3 == 0 else ("decode", 1 + number % 3)
            bench.store.begin_pass(phase)
            for layer in bench.layers:
                choices = np.argsort(rng.random((num_rows, bench.num_experts)), axis=1)[:, :3]
                guess = None
                if phase == "decode" and layer == bench.layers[0]:
                    guess = bench.layers[1], np.sort(rng.permutation(bench.num_experts)[:4])
                here, *parts = bench.run(layer, choices, phase, guess)
                wanted = set(np.unique(choices).tolist())
                late = [expert for part in parts for expert in part]
                assert wanted <= set(here) | set(late)
                assert len(late) == len(set(late)) and not set(late) & set(here)
        assert bench.store.counters.copied_ahead > 0 or num_slots < 16  # where the layer's own work holds most slots


def test_a_prompt_goes_through_transit_and_leaves_the_others_alone(open_bench):
    with open_bench(8, 2) as bench:
        layer, other = bench.layers
        before = [bench.tier.reach.address(n, e) for n in bench.layers for e in range(bench.num_experts)]
        bench.store.begin_pass("prefill")
        _, *parts = bench.run(layer, np.arange(bench.num_experts)[None, :].repeat(20, 0), "prefill")
        assert all(len(part) == 1 for part in parts)  # one slot is filled while the other is computed with
        after = [bench.tier.reach.address(n, e) for n in bench.layers for e in range(bench.num_experts)]
        assert before == after and other != layer


def test_between_steps_experts_that_have_become_hot_move_up(open_bench):
    with open_bench(4) as bench:
        layer = bench.layers[0]
        missing = [e for e in range(bench.num_experts) if not bench.tier.table.address(layer, e)][:2]
        for _ in range(40):
            bench.store.count(layer, np.array([missing]), 1)
        with bench.store.lease(layer, np.array(missing), 0) as lease:
            assert sum(len(members) for members, _ in lease.parts()) == 2
        for _ in range(16):
            bench.store.begin_pass("decode")
        assert all(bench.tier.table.address(layer, expert) for expert in missing)
        (seen,) = bench.run(layer, [missing])
        assert set(missing) <= set(seen)


@pytest.mark.parametrize("is_eager", [False, True])
def test_experts_guessed_in_the_layer_before_are_computed_before_those_that_nobody_guessed(open_bench, is_eager):
    with open_bench(12) as bench:
        layer, following = bench.layers
        first, second, third, never = bench.missing(following)[:4]
        bench.bring_to_host(following, [first, second, never])
        bench.store.begin_pass("decode")
        bench.device.copy.is_eager = is_eager
        bench.run(layer, [[0, 1, 2]] * 2, guess=(following, np.array(sorted([first, second, never]))))
        assert set(bench.missing(following)) >= {first, second, never}  # nobody finds them before they are claimed
        loaded_bytes = bench.device.loaded_bytes
        _, *parts = bench.run(following, [[first, second, third]] * 2)
        assert parts == [sorted([first, second]), [third]]
        tables = 8 * bench.num_experts * 3  # of the layer, and of two parts
        assert bench.device.loaded_bytes - loaded_bytes <= bench.files.layout(following).nbytes + tables
        counters = bench.store.counters
        assert (counters.copied_ahead, counters.ahead_used, counters.ahead_late) == (3, 2, 0 if is_eager else 2)
        assert (counters.guessed, counters.guessed_right, counters.needed) == (3, 2, 3)
        bench.store.begin_pass("decode")
        (seen,) = bench.run(following, [[never, first, second]] * 2)  # brought up in vain, and there now
        assert never in seen
        assert (counters.ahead_used, counters.ahead_wasted) == (3, 0)


def test_a_guess_takes_free_or_colder_slots_alone_and_is_counted_where_it_was_in_vain(open_bench):
    with open_bench(6) as bench:
        layer, following = bench.layers
        cold, hot = bench.missing(following)[:2]
        bench.bring_to_host(following, [cold], num_uses=0)
        bench.bring_to_host(following, [hot], num_uses=20)
        held = [e for e in range(bench.num_experts) if e not in bench.missing(layer)]
        assert len(held) == 6
        bench.store.count(layer, np.array([held] * 2), 2)
        for _ in range(10):
            bench.store.count(layer, np.array([held[:2]] * 2), 2)
        bench.store.begin_pass("decode")
        bench.run(layer, [held[2:4]] * 2, guess=(following, np.array([cold])))
        assert bench.store.counters.copied_ahead == 0
        bench.run(layer, [held[2:4]] * 2, guess=(following, np.array([hot])))
        assert bench.store.counters.copied_ahead == 1
        assert not {*held[:4]} & {*bench.missing(layer)}  # what is hot, and what the layer computes with
        bench.store.begin_pass("decode")
        for _ in range(3):  # every slot is wanted for others
            bench.run(layer, [bench.missing(layer)[:6]] * 2)
        assert bench.store.counters.ahead_wasted == 1


def test_copies_ahead_leave_most_slots_to_what_is_wanted_now(open_bench):
    with open_bench(4) as bench:
        layer, following = bench.layers
        wanted = bench.missing(following)[:4]
        bench.bring_to_host(following, wanted)
        bench.store.begin_pass("decode")
        bench.run(layer, [[0] * 4] * 2, guess=(following, np.array(wanted)))
        assert bench.store.counters.copied_ahead == 1
        others = bench.missing(layer)[:4]
        _, *parts = bench.run(layer, [others] * 2)
        assert set(others) <= {expert for part in parts for expert in part}


def test_a_guess_that_the_host_has_not_is_read_before_its_layer_asks(open_bench):
    with open_bench(6, num_host=4) as bench:
        layer, following = bench.layers
        host = bench.store._residency.pool(following)
        wanted = bench.missing(following)
        (far,) = [e for e in wanted if host.find(following, np.array([e]))[0] < 0][:1]
        for _ in range(40):
            bench.store.count(following, np.array([[far]]), 1)
        bench.store.begin_pass("decode")
        bench.run(layer, [[0]], guess=(following, np.array([far])))
        assert far in bench.run(following, [[far]])[-1]
        counts = bench.store.counters.phases["decode"]
        assert counts.prefetched + counts.late == 1


def test_pinned_host_memory_completes_the_table_and_is_held_while_it_does(open_bench, monkeypatch):
    monkeypatch.setattr("glm_gpu.tiers.vram.BLOCK_BYTES", 1)  # each slot can be given back
    links = [LinkRates(1e9, 1e9)]
    with open_bench(6, 2, num_host=24, links=links) as bench:
        residency = bench.store._residency
        with residency.changed:
            assert residency.changed.wait_for(lambda: not residency.jobs, timeout=LONG_S)
        bench.store.begin_pass("decode")
        assert bench.store.is_reachable()
        for layer in bench.layers:
            bench.compute(layer)(bench.tier.reach.row(layer))
            bench.device.compute.synchronize()
            assert len(bench.seen[-1]) == bench.num_experts
        assert sum(int(pool.leases.sum()) for pool in residency.pools) == 2 * bench.num_experts - 4
        while residency.pass_number % REVIEW_PASSES:  # else the next pass may be a review, which reads
            bench.store.begin_pass("decode")
        assert bench.store.give_back(1 << 20) > 0
        bench.store.begin_pass("decode")
        assert not bench.store.is_reachable()
        assert sum(int(pool.leases.sum()) for pool in residency.pools) == 0
        for layer in bench.layers:
            here, *parts = bench.run(layer, [list(range(bench.num_experts))])
            assert sorted(here + [e for part in parts for e in part]) == list(range(bench.num_experts))


def test_a_read_that_fails_leaves_the_store_whole(open_bench, monkeypatch):
    with open_bench(2, num_host=2) as bench:
        layer = bench.layers[0]
        missing = [e for e in range(bench.num_experts) if not bench.tier.table.address(layer, e)][:2]
        read = bench.files.read

        def fail(of_layer, expert, slab):
            if expert == missing[1]:
                raise OSError(5, "Input/output error")
            read(of_layer, expert, slab)

        monkeypatch.setattr(bench.files, "read", fail)
        with pytest.raises(OSError, match="Input/output"):
            bench.store.compute_missing(layer, np.array([missing]), 1, lambda table: None)
        monkeypatch.undo()
        bench.store.begin_pass("decode")
        here, *parts = bench.run(layer, [missing])
        assert set(missing) <= set(here) | {e for part in parts for e in part}


def test_slabs_are_held_until_they_are_copied_even_if_their_kernel_cannot_be_queued(open_bench):
    def fail(table) -> None:
        raise DeviceMemoryError("no memory")

    with open_bench(2, num_host=2) as bench:
        layer = bench.layers[0]
        missing = [e for e in range(bench.num_experts) if not bench.tier.table.address(layer, e)][:2]
        with pytest.raises(DeviceMemoryError):
            bench.store.compute_missing(layer, np.array([missing]), 1, fail)
        others = [e for e in range(bench.num_experts) if e not in missing]
        with bench.store.lease(layer, np.array(others), 0) as lease:  # takes the host's slots for other bytes
            assert sum(len(members) for members, _ in lease.parts()) == len(others)
        bench.store.begin_pass("decode")
        here, *parts = bench.run(layer, [missing])
        assert set(missing) <= set(here) | {e for part in parts for e in part}


def test_reading_in_place_pays_where_it_is_as_fast_or_little_is_read():
    alike, slow = LinkRates(25e9, 25e9), LinkRates(25e9, 5e9)
    assert reads_in_place(alike, 1e9, 75)
    assert reads_in_place(slow, 1e6, 75)  # 0.2 ms against 75 waits
    assert not reads_in_place(slow, 1e9, 75)  # 200 ms against 40 and 75 waits
