"""Costs against sums by hand, and what they tend to when a rate is without bound."""

import math
from dataclasses import replace

import numpy as np
import pytest

from glm_gpu.predict.cost import (
    ARITHMETIC,
    COPY,
    DEVICE_MEMORY,
    DISK,
    HOST,
    MEMORY,
    OVERHEAD,
    Cost,
    PlaceRates,
    Rates,
    Visits,
    passes_cost,
)
from glm_gpu.predict.parts import Parts

INF = math.inf
# A dense layer and two sparse ones: one multiply-add for each two bytes.
PARTS = Parts(
    attention_bytes=np.array([1e6, 1e6, 1e6]),
    attention_weights=np.array([2e6, 2e6, 2e6]),
    mlp_bytes=np.array([3e6, 5e5, 5e5]),
    mlp_weights=np.array([6e6, 1e6, 1e6]),
    slab_bytes=np.array([0, 4e5, 4e5]),
    expert_weights=800_000,
    head_bytes=2_000_000,
    head_weights=4_000_000,
    core_macs=0,
    most_positions=100,
    experts_per_tok=4,
)
ON_HOST = np.full(3, HOST)
RATES = Rates(PlaceRates(10.0), disk_gb_s=1.0)


def one_token(vram=(0, 0, 0), ram=(0, 4, 4), missing=(0, 0, 0), rows=1) -> Visits:
    return Visits(np.arange(3), np.full(3, rows), np.array(vram), np.array(ram), np.array(missing))


def cost(rates: Rates, visits: Visits, places=ON_HOST, parts=PARTS, positions=0.0, **more) -> Cost:
    return passes_cost(parts, rates, places, visits, positions, 1, **more)


def test_a_resident_token_takes_its_bytes_at_the_memorys_rate():
    found = cost(RATES, one_token())
    assert PARTS.token_bytes == 3e6 + 4e6 + 8 * 4e5 + 2e6
    assert found.seconds == pytest.approx(PARTS.token_bytes / 10e9)
    assert found.bottleneck == MEMORY
    assert found.phases["experts in ram"] == pytest.approx(8 * 4e5 / 10e9)
    assert found.phases["waiting for disk"] == 0


def test_single_matrices_have_a_rate_of_their_own():
    found = cost(replace(RATES, host=PlaceRates(10.0, dense_gb_s=5.0)), one_token())
    assert found.seconds == pytest.approx((3e6 + 4e6 + 2e6) / 5e9 + 8 * 4e5 / 10e9)
    rates = replace(RATES, host=PlaceRates(INF, gmac_s=50.0, dense_gmac_s=100.0))
    assert cost(rates, one_token()).seconds == pytest.approx((6e6 + 8e6) / 100e9 + 2 * 4 * 8e5 / 50e9)


def test_with_rates_without_bound_nothing_takes_time():
    unbound = Rates(PlaceRates(INF), INF, 0.0, (PlaceRates(INF),), (INF,))
    for places in (ON_HOST, np.zeros(3, int)):
        assert cost(unbound, one_token(ram=(0, 2, 2), missing=(0, 2, 2)), places).seconds == 0


def test_with_a_memory_without_bound_only_the_disk_is_left():
    rates = replace(RATES, host=PlaceRates(INF))
    found = cost(rates, one_token(ram=(0, 0, 0), missing=(0, 4, 4)))
    assert found.seconds == found.limits[DISK] == found.phases["waiting for disk"] == pytest.approx(8 * 4e5 / 1e9)


def test_reads_hide_behind_arithmetic_but_for_the_last_expert():
    # a layer: MLP 50 us and four experts of 40 us; one read of 400 us, then that expert
    found = cost(RATES, one_token(ram=(0, 3, 4), missing=(0, 1, 0)))
    waited = 400e-6 + 40e-6 - (50e-6 + 160e-6)
    assert found.phases["waiting for disk"] == pytest.approx(waited)
    assert found.seconds == pytest.approx(PARTS.token_bytes / 10e9 + waited)
    fast = cost(replace(RATES, disk_gb_s=4.0), one_token(ram=(0, 3, 4), missing=(0, 1, 0)))
    assert fast.phases["waiting for disk"] == 0, "a read of 100 us is over before the others are computed"


def test_engines_that_read_first_and_compute_then_take_both():
    rates = replace(RATES, are_reads_hidden=False)
    found = cost(rates, one_token(ram=(0, 3, 4), missing=(0, 1, 0)))
    assert found.phases["waiting for disk"] == found.limits[DISK] == pytest.approx(400e-6)
    assert found.seconds == pytest.approx(PARTS.token_bytes / 10e9 + 400e-6)


def test_the_first_read_of_a_layer_costs_its_latency_once():
    rates = replace(RATES, read_s=0.5)
    more = cost(rates, one_token(ram=(0, 0, 0), missing=(0, 4, 4))).seconds
    assert more - cost(RATES, one_token(ram=(0, 0, 0), missing=(0, 4, 4))).seconds == pytest.approx(2 * 0.5)


def test_many_rows_are_bound_by_arithmetic_and_few_by_bytes():
    rates = Rates(PlaceRates(10.0, gmac_s=100.0), 1.0)
    few, many = cost(rates, one_token()), cost(rates, one_token(rows=1000))
    assert few.bottleneck == MEMORY and many.bottleneck == ARITHMETIC
    macs = 1000 * (6e6 + 8e6 + 2 * 4 * 8e5)
    assert many.seconds == pytest.approx(macs / 100e9 + 2e6 / 10e9)


def test_cached_positions_cost_up_to_the_most_that_are_attended():
    parts = replace(PARTS, core_macs=1_000_000)
    rates = Rates(PlaceRates(INF, gmac_s=1.0), 1.0)
    seconds = [cost(rates, one_token(), parts=parts, positions=n).phases["attention"] for n in (0, 50, 100, 200)]
    assert np.diff(seconds) == pytest.approx([3 * 50 * 1e6 / 1e9, 3 * 50 * 1e6 / 1e9, 0])


def test_experts_in_ram_come_to_a_device_as_fast_as_they_are_copied():
    rates = Rates(PlaceRates(10.0), 1.0, 0.0, (PlaceRates(1000.0),), (2.0,))
    there = np.zeros(3, int)
    found = cost(rates, one_token(vram=(0, 2, 2), ram=(0, 2, 2)), there)
    assert found.bottleneck == COPY
    expected = 2 * 4e5 / 2e9 + 4e5 / 1000e9  # two copies, then the last one's products
    assert found.seconds == pytest.approx(2 * expected + (3e6 + 3e6 + 2e6) / 1000e9)
    resident = cost(rates, one_token(vram=(0, 4, 4), ram=(0, 0, 0)), there)
    assert resident.seconds == pytest.approx(PARTS.token_bytes / 1000e9)
    assert resident.bottleneck == DEVICE_MEMORY


def test_misses_that_the_host_computes_are_not_copied():
    rates = Rates(PlaceRates(10.0), 1.0, 0.0, (PlaceRates(1000.0),), (2.0,), are_misses_computed_on_host=True)
    found = cost(rates, one_token(), np.zeros(3, int))
    assert found.phases["waiting for copies"] == 0
    assert found.seconds == pytest.approx(8 * 4e5 / 10e9 + (3e6 + 3e6 + 2e6) / 1000e9)
    assert found.bottleneck == MEMORY


def test_streamed_layers_are_read_in_every_pass():
    found = cost(RATES, one_token(), is_streamed=True)
    assert found.seconds == pytest.approx((3e6 + 4e6) / 1e9 + 2e6 / 10e9)
    assert found.bottleneck == DISK


def test_overhead_is_a_layers():
    found = cost(replace(RATES, host=PlaceRates(10.0, layer_s=1.0)), one_token())
    assert found.phases["overhead"] == found.limits[OVERHEAD] == 3
    assert found.bottleneck == OVERHEAD


@pytest.mark.parametrize("missing", [0, 1, 3])
@pytest.mark.parametrize("place", [HOST, 0])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_both_accounts_add_up(missing, place, on_host, is_hidden):
    device = PlaceRates(500.0, 900.0, 1e-6)
    rates = Rates(PlaceRates(10.0, 50.0, 1e-5), 1.0, 1e-4, (device,), (4.0,), on_host, is_hidden)
    visits = one_token(ram=(0, 4 - missing, 2), missing=(0, missing, 1), vram=(0, 0, 1 if place == 0 else 0), rows=3)
    found = cost(rates, visits, np.array([place, HOST, place]))
    assert sum(found.limits.values()) == pytest.approx(found.seconds)
    assert found.scaled(0.5).seconds == pytest.approx(found.seconds / 2)
