"""Heat between runs: kept per model, weighing little, and nothing that goes wrong with its file stops a run."""

import numpy as np
import pytest

from glm_gpu.engine import Engine
from glm_gpu.opening import EngineOptions
from glm_gpu.sampling import SamplingParams
from glm_gpu.state import write_state
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.heat_file import HeatFile


def some_heat(num_tokens: int = 50) -> Heat:
    rng, heat = np.random.default_rng(5), Heat(3, 16)
    for _ in range(num_tokens):
        for layer in (1, 2):
            heat.count(layer, rng.permutation(16)[None, :4], "decode")
    heat.count(1, np.array([rng.permutation(16)[:4] for _ in range(9)]), "prefill")
    return heat


def test_heat_survives_a_run(tmp_path):
    heat = some_heat()
    HeatFile(tmp_path, "f00d").save(heat)
    loaded = HeatFile(tmp_path, "f00d").load(3, 16)
    for phase in ("prefill", "decode"):
        np.testing.assert_array_equal(loaded.uses[phase], heat.uses[phase])
        np.testing.assert_array_equal(loaded.tokens[phase], heat.tokens[phase])
    np.testing.assert_array_equal(loaded.clock, heat.clock)
    np.testing.assert_array_equal(loaded.last_use, heat.last_use)
    np.testing.assert_allclose(loaded.rates(), heat.rates(), rtol=1e-12)


def test_saving_does_not_disturb_a_run(tmp_path):
    heat, undisturbed = some_heat(), some_heat()
    HeatFile(tmp_path, "f00d").save(heat)
    for each in (heat, undisturbed):
        each.count(1, np.array([[1, 2]]), "decode")
    np.testing.assert_allclose(heat.rates(), undisturbed.rates(), rtol=1e-12)


def test_earlier_runs_weigh_as_much_as_a_few_hundred_tokens(tmp_path):
    HeatFile(tmp_path, "f00d").save(some_heat(2000))
    loaded = HeatFile(tmp_path, "f00d").load(3, 16)
    before = loaded.rates()[0][2, 7]
    num_tokens = 100
    loaded.count(2, np.full((num_tokens, 1), 7), "prefill")
    new_weight = (2.0 ** (-np.arange(num_tokens) / 1024)).sum()
    old_weight = 256 * 2.0 ** (-num_tokens / 1024)
    expected = (old_weight * before + new_weight) / (old_weight + new_weight)
    assert loaded.rates()[0][2, 7] == pytest.approx(expected, rel=1e-9)


def test_models_do_not_share_heat(tmp_path):
    HeatFile(tmp_path, "f00d").save(some_heat())
    assert not HeatFile(tmp_path, "beef").load(3, 16).clock.any()


def rename(path):
    path.rename(path.with_name("beef.heat"))
    return "beef"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def newer(path):
    write_state(path, "heat", 2, {"fingerprint": "f00d"}, some_heat().arrays())


def other_shape(path):
    write_state(path, "heat", 1, {"fingerprint": "f00d"}, Heat(3, 17).arrays())


def not_finite(path):
    arrays = some_heat().arrays()
    arrays["weighted"][0, 1, 2] = np.inf
    write_state(path, "heat", 1, {"fingerprint": "f00d"}, arrays)


def other_program(path):
    path.write_text("hello\n" * 100)


@pytest.mark.parametrize("spoil", [rename, truncate, empty, newer, other_shape, not_finite, other_program])
def test_a_file_that_cannot_be_trusted_is_one_warning_and_a_fresh_start(tmp_path, caplog, spoil):
    HeatFile(tmp_path, "f00d").save(some_heat())
    fingerprint = spoil(tmp_path / "heat" / "f00d.heat") or "f00d"
    heat_file = HeatFile(tmp_path, fingerprint)
    heat = heat_file.load(3, 16)
    assert not heat.clock.any() and not heat.rates()[0].any()
    assert len(caplog.records) == 1 and "starting afresh" in caplog.text and "\n" not in caplog.messages[0]
    heat_file.save(some_heat())  # and the next run has a good one
    assert HeatFile(tmp_path, fingerprint).load(3, 16).clock.any()


def test_no_state_folder_keeps_nothing_and_says_nothing(caplog):
    heat_file = HeatFile(None, "f00d")
    heat_file.save(some_heat())
    assert not heat_file.load(3, 16).clock.any()
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "heat").write_text("a file where the folder should be")
    heat_file = HeatFile(tmp_path, "f00d")
    assert not heat_file.load(3, 16).clock.any()
    caplog.clear()
    heat_file.save(some_heat())
    heat_file.save(some_heat())
    assert len(caplog.records) == 1 and "XDG_STATE_HOME" in caplog.text


def test_read_only_heat_is_used_and_never_written(tmp_path):
    HeatFile(tmp_path, "f00d").save(some_heat())
    path = tmp_path / "heat" / "f00d.heat"
    before = path.read_bytes()
    heat_file = HeatFile(tmp_path, "f00d", is_read_only=True)
    heat = heat_file.load(3, 16)
    assert heat.clock.any()
    heat.count(1, np.array([[3]]), "decode")
    heat_file.save(heat)
    assert path.read_bytes() == before
    HeatFile(tmp_path, "beef", is_read_only=True).save(heat)
    assert [entry.name for entry in path.parent.iterdir()] == ["f00d.heat"]


def test_an_engine_goes_on_from_the_heat_of_the_run_before(tmp_path):
    def run(**options) -> dict:
        with Engine.open(options=EngineOptions(context=64, speculate="off", state=tmp_path, **options)) as engine:
            before = engine.store.heat.decayed(1).sum()
            session = engine.session()
            list(session.generate(engine.tokenizer.encode("In the beginning"), SamplingParams(temperature=0), 8))
            return {"before": before, "after": engine.store.heat.decayed(1).sum()}

    first, second = run(), run(is_heat_read_only=True)
    assert first["before"] == 0 and 0 < second["before"] <= first["after"]
    assert run()["before"] == second["before"]
