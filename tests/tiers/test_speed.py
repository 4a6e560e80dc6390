"""Speed from bytes and rates, by hand."""

import dataclasses

import pytest

from glm_gpu.tiers.budget import Budget
from glm_gpu.tiers.plan import Demand, make_plan
from glm_gpu.tiers.sizes import ModelSizes
from glm_gpu.tiers.speed import Rates, expected_speed, load_rates, measure_memory, save_rates

SIZES = ModelSizes(
    end_bytes=2_000_000,
    layer_bytes=(1_000_000, 1_000_000),
    slab_nbytes=(0, 100_000),
    slot_nbytes=(0, 100_000),
    num_experts=8,
    experts_per_tok=2,
)
RATES = Rates(memory_gb_s=10.0, disk_gb_s=1.0)


def plan(ram: int):
    return make_plan(SIZES, Budget(ram, "--ram"), Demand(100, True, (0, 0), lambda context: 0, 1))


def test_everything_in_memory_is_bound_by_memory():
    speed = expected_speed(plan(10_000_000), SIZES, RATES)
    assert speed.memory_bytes == 2_000_000 + 1_000_000 + 2 * 100_000
    assert speed.disk_bytes == 0
    assert speed.tok_s == pytest.approx(10e9 / 3_200_000)


def test_experts_on_disk_bound_by_the_disk():
    speed = expected_speed(plan(4_400_000), SIZES, RATES)  # 4 of 8 experts fit
    assert speed.disk_bytes == pytest.approx(100_000)
    assert speed.tok_s == pytest.approx(1 / max(3_200_000 / 10e9, 100_000 / 1e9))


def test_streamed_layers_come_from_the_disk():
    sizes = dataclasses.replace(SIZES, layer_bytes=(1_000_000,) * 5 + (0,), slab_nbytes=(100_000,) * 5 + (0,))
    sizes = dataclasses.replace(sizes, slot_nbytes=sizes.slab_nbytes)
    streamed = make_plan(sizes, Budget(6_000_000, "--ram"), Demand(100, True, (0,) * 6, lambda context: 0, 1))
    assert streamed.is_streamed
    on_disk = next(tier.heat_share for tier in streamed.tiers if tier.name == "disk")
    assert expected_speed(streamed, sizes, RATES).disk_bytes == pytest.approx(5_000_000 + on_disk * 5 * 200_000)


def test_rates_are_kept(tmp_path):
    assert load_rates(tmp_path) is None and load_rates(None) is None
    save_rates(tmp_path, RATES)
    assert load_rates(tmp_path) == RATES


def test_memory_is_measured():
    assert 0.1 < measure_memory(2) < 10_000
