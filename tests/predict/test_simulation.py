"""Whole simulations: they repeat, they obey order, and they know what the real planner knows."""

from dataclasses import replace

import numpy as np
import pytest

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CapacityError
from glm_gpu.opening import EngineOptions
from glm_gpu.predict.machines import Gpu, Machine, open_machine, shipped_machines
from glm_gpu.predict.parts import PlannedContainer, model_parts
from glm_gpu.predict.prediction import Workload
from glm_gpu.predict.simulation import Simulation, glm_config, simulate
from glm_gpu.recipe import Recipe
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.sizes import model_sizes

GIB = 1 << 30
# Six sparse layers of 64 experts, 8 GB, in place of 75 of 256: as many bytes an expert, so the same order of events.
FULL = glm_config()
CONFIG = replace(
    FULL,
    num_hidden_layers=9,
    mlp_layer_types=FULL.mlp_layer_types[:9],
    indexer_types=FULL.indexer_types[:9],
    n_routed_experts=64,
    num_nextn_predict_layers=0,
)
DESKTOP = Machine("desktop", 8, 10 * GIB, 70.0, 5.0)
CARD = Gpu(6 * GIB, 1000.0, 25.0, 165.0)
SHORT = Workload(prompt_tokens=24, new_tokens=12, seed=5)


def run(machine: Machine, workload: Workload = SHORT) -> Simulation:
    return simulate(machine, EngineOptions(context=1024), workload, CONFIG)


def test_the_same_seed_simulates_the_same():
    first, second = run(DESKTOP).prediction, run(DESKTOP).prediction
    assert first == second
    assert run(DESKTOP, replace(SHORT, seed=6)).prediction != first


def test_more_ram_is_never_slower():
    rams = (8, 10, 12, 14, 24)
    found = [run(replace(DESKTOP, ram_bytes=ram * GIB)).prediction for ram in rams]
    rates, hits = [p.tok_s for p in found], [p.hit_rate for p in found]
    assert rates == sorted(rates) and hits == sorted(hits), (rates, hits)
    assert found[0].decode.bottleneck == "disk" and found[-1].decode.bottleneck == "memory bandwidth"
    assert found[-1].hit_rate == 1


def test_a_faster_disk_helps_only_where_something_is_missing():
    def rates(ram_bytes: int) -> list[float]:
        return [run(replace(DESKTOP, ram_bytes=ram_bytes, disk_gb_s=disk)).prediction.tok_s for disk in (5.0, 10.0)]

    slow, fast = rates(8 * GIB)
    assert fast > 1.3 * slow
    slow, fast = rates(24 * GIB)
    assert fast == slow


def test_a_users_own_heat_decides_what_is_routed_and_kept():
    heat, rng = Heat(CONFIG.num_hidden_layers + 1, 64), np.random.default_rng(0)
    for layer in CONFIG.sparse_layers:
        heat.count(layer, np.array([rng.permutation(12)[:8] for _ in range(200)]), "decode")
    machine = replace(DESKTOP, ram_bytes=8 * GIB)
    own = simulate(machine, EngineOptions(context=1024), SHORT, CONFIG, heat).prediction
    assert own.hit_rate > 0.9 > run(machine).prediction.hit_rate
    few = Heat(CONFIG.num_hidden_layers + 1, 64)  # of no tokens: what was published counts
    assert simulate(machine, EngineOptions(context=1024), SHORT, CONFIG, few).prediction == run(machine).prediction


def test_a_card_takes_over_and_what_it_holds_is_used():
    with_card = run(replace(DESKTOP, gpus=(CARD,)))
    assert with_card.plan.devices[0].num_experts > 0
    assert with_card.prediction.vram_rate > 0
    assert with_card.prediction.tok_s > run(DESKTOP).prediction.tok_s


def test_enough_vram_leaves_nothing_else_to_wait_for():
    found = run(replace(DESKTOP, gpus=(replace(CARD, vram_bytes=40 * GIB),))).prediction
    assert found.vram_rate == found.hit_rate == 1
    assert found.decode.bottleneck == "device memory bandwidth"
    assert found.decode.phases["waiting for copies"] == found.decode.phases["waiting for disk"] == 0


def test_a_machine_too_small_is_refused_with_its_name():
    with pytest.raises(CapacityError, match="the machine desktop"):
        run(replace(DESKTOP, ram_bytes=3 * GIB))


@pytest.mark.parametrize("name", shipped_machines())
def test_every_shipped_machine_is_told_its_speed_and_what_bounds_it(name):
    found = simulate(open_machine(name), EngineOptions(context=1024), SHORT).prediction
    assert 0.01 < found.tok_s < 1000 and found.decode.bottleneck and found.first_token_s > 0


def test_parts_are_the_planners_sizes_and_the_models_weights():
    config, recipe = FULL, Recipe.default()
    parts = model_parts(config, recipe)
    sizes = model_sizes(PlannedContainer(config, recipe), recipe, with_mtp=False)
    layers = sizes.layer_bytes[: config.num_hidden_layers]
    assert (parts.attention_bytes + parts.mlp_bytes).tolist() == list(layers)
    assert parts.slab_bytes.tolist() == list(sizes.slab_nbytes[: config.num_hidden_layers])
    active = (
        parts.attention_weights.sum() + parts.mlp_weights.sum() + 75 * 8 * parts.expert_weights + parts.head_weights
    )
    # the vendor's 40 B active parameters; the embedding, of which a token takes a row, is 0.95 B
    assert active == pytest.approx(40e9, rel=0.03)
    assert np.array_equal(np.flatnonzero(parts.slab_bytes), np.arange(3, 78))


def test_other_architectures_have_parts_too(oracle_dir):
    config = ModelConfig.open(oracle_dir / "tiny_olmoe")
    parts = model_parts(config, Recipe.default())
    assert parts.num_layers == config.num_hidden_layers and parts.slab_bytes.min() > 0 and not parts.mlp_bytes.any()
