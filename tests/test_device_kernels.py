"""Which kernels a model needs is known without running it."""

import numpy as np
import pytest
from device_models import greedy, on_devices, options_for

from glm_gpu.config import ModelConfig
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.kernels.launch import Recorder, describe
from glm_gpu.kernels.simulator import Simulator
from glm_gpu.model.device_footprint import dry_run
from glm_gpu.recipe import Recipe
from glm_gpu.sampling import SamplingParams


# tiny_olmoe chooses 3 experts a token, so that its layers' choices lie 12 bytes apart and promise no alignment
@pytest.mark.parametrize("name", ["tiny_glm", None])
def test_dry_run_launches_all_that_a_pass_does(oracle_dir, monkeypatch, name):
    launched = {}
    launch = Simulator.launch

    def recorded(self, kernel, grid, arguments, constants):
        launched[describe(kernel, arguments, constants)[0]] = None
        launch(self, kernel, grid, arguments, constants)

    monkeypatch.setattr(Simulator, "launch", recorded)
    path = None if name is None else oracle_dir / name
    with Engine.open(path, options_for(path, devices=on_devices(1 << 30), speculate="mtp")) as engine:
        greedy(engine, np.arange(20).tolist(), 3)
        list(engine.session().generate(range(20), SamplingParams(temperature=0.0), 4, ignore_eos=True))

    recorder = Recorder()
    config = ModelConfig.open(path or DEMO_MODEL)
    recipe = Recipe.from_bits(4, 4, 64) if name is None else Recipe.from_bits(16, 16, 64)
    for num_rows in (20, 19, 2, 1):
        for context in (num_rows, 64):
            dry_run(config, num_rows, context, recorder, recipe, with_mtp=True)
    missing = [s for s in launched if s not in recorder.specializations]
    assert not missing
