"""The plan: never beyond a budget, never less than it may use, and every expert in just one place."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_gpu.errors import CapacityError, RequestError
from glm_gpu.machine import Memory
from glm_gpu.tiers.budget import Budget, DeviceBudget, host_budget
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.placement import NO_TIER, TIERS
from glm_gpu.tiers.plan import Demand, Plan, make_plan
from glm_gpu.tiers.sizes import ModelSizes

GIB = 1 << 30
# GLM-5.2 at four bits in groups of 64, draft layer at eight: bytes by hand from the shapes in its config.json
GLM = ModelSizes(
    end_bytes=1_905_000_000,
    layer_bytes=(260_000_000,) * 3 + (120_000_000,) * 75 + (250_000_000,),
    slab_nbytes=(0,) * 3 + (21_233_664,) * 75 + (37_797_888,),
    slot_nbytes=(0,) * 3 + (21_233_664,) * 75 + (37_801_984,),
    num_experts=256,
    experts_per_tok=8,
    read_bytes=21_250_000,
)
SMALL = ModelSizes(
    end_bytes=1000,
    layer_bytes=(500, 300, 300, 300, 300, 300, 400),
    slab_nbytes=(0, 90, 90, 90, 90, 90, 180),
    slot_nbytes=(0, 100, 100, 100, 100, 100, 200),
    num_experts=16,
    experts_per_tok=3,
    end_load_bytes=700,
    layer_load_bytes=200,
    read_bytes=110,
)


def demand(
    context=64, is_asked=True, per_token=(1,) * 6 + (0,), pass_bytes=lambda context: 400 + context, **more
) -> Demand:
    return Demand(context, is_asked, per_token, pass_bytes, num_read_threads=2, **more)


def glm_demand() -> Demand:
    return Demand(8192, False, (1152,) * 78 + (0,), lambda context: 600 << 20)


def small_plan(ram: int, heat: Heat | None = None, memlock: int | None = None, spare: int = 0, **more) -> Plan:
    return make_plan(SMALL, Budget(ram, "--ram", 50, spare, memlock), demand(**more), heat)


@lru_cache
def some_heat(seed: int) -> Heat:
    """Skewed routing: of 16 experts the first in an order of each layer's own are chosen most."""
    rng, heat = np.random.default_rng(seed), Heat(7, 16)
    for layer in range(1, 7):
        scores = rng.gumbel(size=(200, 16)) + rng.normal(0, 2, 16)
        heat.count(layer, np.argsort(-scores, axis=1)[:, :3], "decode")
    return heat


NUM_EXPERTS = 6 * 16
budgets = st.integers(5418, 17_000)  # from the floor with layers in memory to more than everything
heats = st.one_of(st.none(), st.integers(0, 5).map(some_heat))


@given(budgets, heats, st.one_of(st.none(), st.integers(0, 3000)), st.integers(0, 4000))
@settings(max_examples=60)
def test_a_plan_stays_within_its_budget_and_uses_what_it_may(ram, heat, memlock, spare):
    plan = small_plan(ram, heat, memlock, spare)
    assert plan.ram_bytes <= ram
    assert sum(plan.num_slots.values()) == NUM_EXPERTS or ram - plan.ram_bytes < max(SMALL.slot_nbytes)
    assert plan.lock_bytes <= (plan.slot_bytes if memlock is None else memlock)
    for size, count in plan.num_pinned.items():
        assert count < plan.num_slots[size]


@given(budgets, heats, st.one_of(st.none(), st.integers(0, 3000)), st.integers(0, 4000))
@settings(max_examples=40)
def test_every_expert_is_in_one_tier_and_tiers_add_up(ram, heat, memlock, spare):
    plan = small_plan(ram, heat, memlock, spare)
    assert (plan.placement[0] == NO_TIER).all()
    assert (plan.placement[1:] < len(TIERS)).all()
    assert sum(tier.num_experts for tier in plan.tiers) == NUM_EXPERTS
    assert sum(tier.nbytes for tier in plan.tiers) == SMALL.expert_bytes
    assert sum(tier.heat_share for tier in plan.tiers) == pytest.approx(1)
    in_slots = sum(tier.num_experts for tier in plan.tiers if tier.name in ("locked", "ram"))
    assert in_slots == sum(plan.num_slots.values())


@given(budgets, st.integers(0, 3000), heats)
@settings(max_examples=40)
def test_more_memory_never_gives_fewer_slots(ram, more, heat):
    less, larger = small_plan(ram, heat), small_plan(ram + more, heat)
    for size, count in less.num_slots.items():
        assert larger.num_slots[size] >= count
        assert larger.num_pinned[size] >= less.num_pinned[size]


def test_hottest_experts_for_their_bytes_get_the_slots():
    heat = some_heat(3)
    plan = small_plan(8000, heat)
    slow, fast = heat.rates()
    hot = 0.4 * slow + 0.6 * fast
    in_slots = np.isin(plan.placement, [TIERS.index("locked"), TIERS.index("ram")])
    for layers in ([1, 2, 3, 4, 5], [6]):  # within a slab size, no expert outside is hotter than one inside
        inside, outside = hot[layers][in_slots[layers]], hot[layers][~in_slots[layers]]
        assert inside.min() >= outside.max()
    locked = plan.placement == TIERS.index("locked")
    assert hot[1:6][locked[1:6]].min() >= hot[1:6][(in_slots & ~locked)[1:6]].max()


def test_slots_go_to_the_slab_size_whose_experts_are_used_more_for_their_bytes():
    def slots_of_draft_layer(draft_uses: list[int]) -> int:
        heat = Heat(7, 16)
        for layer in range(1, 6):
            heat.count(layer, np.tile([[0, 1, 2]], (300, 1)), "decode")
        heat.count(6, np.array([np.roll(draft_uses, n)[:3] for n in range(300)]), "decode")
        return small_plan(8000, heat).num_slots[200]

    even, narrow = slots_of_draft_layer(list(range(16))), slots_of_draft_layer([0, 1, 2, 3])
    assert narrow > 3  # the fourth expert of a narrow draft layer beats the idle ones of every other layer
    assert even > narrow


def test_floor_is_the_sum_of_what_a_pass_cannot_do_without():
    # program 50, weights 3400, cache 6 x 64, pass 464, readers 2 x 110, 3 slots of each size 900
    need = 50 + 3400 + 384 + 464 + 220 + 900
    assert small_plan(need).num_slots == {100: 3, 200: 3}
    assert not small_plan(need).is_streamed
    assert small_plan(need - 1).is_streamed


def test_streamed_plan_keeps_three_layers_and_what_reading_one_takes():
    plan = small_plan(5200)
    assert plan.is_streamed and any("do not fit" in reason for reason in plan.reasons)
    assert plan.dense_bytes == 1000 + 400 + 3 * 500
    assert plan.pass_bytes == 464 + 200


def test_refusal_names_every_part():
    with pytest.raises(CapacityError) as refusal:
        small_plan(2000)
    message = str(refusal.value)
    for part in ("5.00 KiB", "1.95 KiB", "--ram", "cache of 64 positions 384 B", "largest pass", "loading 700 B"):
        assert part in message, (part, message)


def test_loading_has_to_fit_too():
    sizes = ModelSizes(**{**SMALL.__dict__, "end_load_bytes": 5000})
    with pytest.raises(CapacityError, match=r"loading 4\.88 KiB"):
        make_plan(sizes, Budget(7900, "--ram", 50), demand())


def test_context_nobody_asked_for_is_cut_before_layers_are_streamed():
    plan = small_plan(40_000, context=8192, is_asked=False, per_token=(1,) * 6 + (0,), pass_bytes=lambda context: 400)
    assert (plan.context, plan.is_streamed) == (4096, False)
    assert any("cut from 8192 to 4096" in reason for reason in plan.reasons)
    with pytest.raises(CapacityError):
        small_plan(40_000, context=8192, is_asked=True, per_token=(1,) * 6 + (0,), pass_bytes=lambda context: 400)


def test_expert_slots_cap_all_sizes_together():
    for count in (2, 5, 20, 100):
        plan = small_plan(17_000, some_heat(1), expert_slots=count)
        assert sum(plan.num_slots.values()) == min(count, NUM_EXPERTS)
        assert min(plan.num_slots.values()) >= 1
    with pytest.raises(RequestError, match="expected at least 2"):
        small_plan(17_000, expert_slots=1)


def test_locking_is_planned_within_the_limit_and_the_reason_told():
    """C28."""
    plan = small_plan(17_000, memlock=1000)
    assert plan.lock_bytes == 1000
    assert any("ulimit -l" in reason for reason in plan.reasons)
    locked = next(tier for tier in plan.tiers if tier.name == "locked")
    assert locked.num_experts == 10
    assert not any(tier.name == "locked" for tier in small_plan(17_000, memlock=0).tiers)


def test_reads_are_buffered_only_where_memory_is_left_for_the_page_cache():
    assert small_plan(6000, spare=100).read_mode == "direct"
    plan = small_plan(6000, spare=6000)
    assert plan.read_mode == "buffered"
    assert any(tier.name == "page cache" for tier in plan.tiers)
    assert small_plan(6000, spare=6000, read_mode="direct").read_mode == "direct"


def test_glm_on_common_machines():
    """Whole model 388 GiB: what each machine can hold, by hand from the sizes above."""
    for ram_gib, streamed in ((8, True), (16, False), (64, False), (256, False), (512, False)):
        plan = make_plan(GLM, Budget(ram_gib * GIB, "--ram", 60 << 20), glm_demand())
        assert plan.is_streamed == streamed, ram_gib
        assert plan.ram_bytes <= ram_gib * GIB
    everything = make_plan(GLM, Budget(512 * GIB, "--ram"), glm_demand())
    assert everything.num_slots == {21_233_664: 75 * 256, 37_801_984: 256}
    sixteen = make_plan(GLM, Budget(16 * GIB, "--ram", 60 << 20), glm_demand())
    assert 50 <= sum(sixteen.num_slots.values()) < 200


def devices(*gigabytes: tuple[int, int]) -> tuple[DeviceBudget, ...]:
    return tuple(DeviceBudget(f"gpu{n}", total * GIB, used * GIB) for n, (total, used) in enumerate(gigabytes))


@pytest.mark.parametrize(
    "cards", [((24, 1), (12, 0), (48, 5), (8, 0)), ((8, 0), (24, 1)), ((80, 0),), ((2, 1), (24, 0))]
)
def test_each_card_is_filled_from_its_own_free_memory(cards):
    """C24."""
    budget = Budget(128 * GIB, "--ram", devices=devices(*cards))
    plan = make_plan(GLM, budget, glm_demand(), None)
    layers = [layer for device in plan.devices for layer in device.layers]
    assert layers == list(range(len(layers)))  # whole layers, in the order of a pass, none twice
    for device, (total, used) in zip(plan.devices, cards, strict=True):
        assert device.used_bytes <= max(0, total - used) * GIB
        if device.layers and device.num_experts < 256 * sum(layer >= 3 for layer in device.layers):
            assert device.free_bytes - device.used_bytes < max(GLM.slot_nbytes)  # filled up
    on_cards = sum(device.num_experts for device in plan.devices)
    assert on_cards == (plan.placement == TIERS.index("vram")).sum() > 0
    assert plan.dense_bytes + sum(device.dense_bytes for device in plan.devices) == GLM.dense_bytes


def test_experts_are_spread_over_unequal_cards_by_their_room():
    plan = make_plan(GLM, Budget(128 * GIB, "--ram", devices=devices((24, 1), (12, 0), (48, 5), (8, 0))), glm_demand())
    for device in plan.devices:
        assert device.layers, device
    large, small = plan.devices[2], plan.devices[3]
    assert len(large.layers) > 3 * len(small.layers)


def test_card_experts_are_the_hottest_of_its_layers():
    heat = some_heat(2)
    budget = Budget(9000, "--ram", 50, devices=(DeviceBudget("gpu0", 3700, 0, 0),))
    plan = make_plan(SMALL, budget, demand(pass_bytes=lambda context: 100), heat)
    (card,) = plan.devices
    slow, fast = heat.rates()
    hot = (0.4 * slow + 0.6 * fast)[list(card.layers)]
    on_card = plan.placement[list(card.layers)] == TIERS.index("vram")
    same_size = [n for n, layer in enumerate(card.layers) if SMALL.slot_nbytes[layer] == 100]
    assert on_card.any() and not on_card[same_size].all()
    assert hot[same_size][on_card[same_size]].min() >= hot[same_size][~on_card[same_size]].max()


def memory(available: int, bound_by: str = "the machine", memlock: int | None = None) -> Memory:
    return Memory(64 * GIB, available, None, memlock, bound_by)


def test_host_budget_obeys_ram_within_the_limits():
    asked = host_budget(memory(10 * GIB), GIB, 4 * GIB)
    assert (asked.ram_bytes, asked.spare_bytes, asked.reason) == (4 * GIB, 7 * GIB, "--ram")
    capped = host_budget(memory(3 * GIB, "control group /box"), GIB, 8 * GIB)
    assert capped.ram_bytes == 4 * GIB
    assert capped.reason == "control group /box leaves less than --ram 8.00 GiB"


def test_host_budget_leaves_a_reserve_when_nobody_asked():
    assert host_budget(memory(40 * GIB), 0, None).ram_bytes == 39 * GIB
    small = host_budget(memory(100 << 20), 20 << 20, None)
    assert small.ram_bytes == (120 << 20) - (10 << 20)
