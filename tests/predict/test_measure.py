"""Measured rates: they are found, kept, and read again."""

import numpy as np
import pytest

from glm_gpu.predict import measure
from glm_gpu.predict.cost import PlaceRates, Rates
from glm_gpu.quant import FORMATS
from glm_gpu.slab import SlabLayout
from glm_gpu.state import write_state
from glm_gpu.tiers.read_bench import ReadRate

RATES = Rates(PlaceRates(20.0, 100.0, 0.001, 16.0, 140.0), disk_gb_s=1.5, read_s=0.002)


@pytest.mark.parametrize("format", ["int4_g64", "int8", "bf16", "f32"])
def test_kernels_are_measured_in_every_format(monkeypatch, format):
    monkeypatch.setattr(measure, "_MEASURE_S", 0.01)
    monkeypatch.setattr(measure, "_WEIGHTS_BYTES", 1 << 20)
    with np.errstate(all="ignore"):  # random bf16 bits may be anything
        found = measure.measure_host(SlabLayout(FORMATS[format], 128, 64), "int16")
    assert all(0 < rate < 100_000 for rate in (found.weights_gb_s, found.gmac_s, found.dense_gb_s, found.dense_gmac_s))


def test_rates_are_kept(tmp_path):
    assert measure.load_rates(tmp_path) is None and measure.load_rates(None) is None
    measure.save_rates(tmp_path, RATES)
    assert measure.load_rates(tmp_path) == RATES


def test_the_disks_rate_is_the_best_and_a_lone_read_costs_its_latency():
    rows = [
        ReadRate("buffered", 1, (9.0,), cached_share=1.0),
        ReadRate("direct", 1, (1.0,), 0.0),
        ReadRate("direct", 4, (2.0,), 0.0),
        ReadRate("direct", 8, (), 0.0, refused="no"),
    ]
    assert measure.disk_rates(rows, 20_000_000) == (2.0, pytest.approx(0.01))
    assert measure.disk_rates(rows[:1], 1) is None


@pytest.mark.parametrize("damage", [{"gmac_s": "fast"}, {"disk_gb_s": 0.0}, {"read_s": -1.0}, {"weights_gb_s": None}])
def test_kept_rates_that_are_none_are_not_used(tmp_path, caplog, damage):
    fields = {"weights_gb_s": 20.0, "gmac_s": 100.0, "disk_gb_s": 1.5, "dense_gb_s": 16.0, "dense_gmac_s": 140.0}
    fields |= {"read_s": 0.0, "layer_s": 0.001}
    write_state(tmp_path / "rates", "rates", 2, fields, {})
    assert measure.load_rates(tmp_path) is not None and not caplog.records
    write_state(tmp_path / "rates", "rates", 2, fields | damage, {})
    assert measure.load_rates(tmp_path) is None and "are no rates" in caplog.text
