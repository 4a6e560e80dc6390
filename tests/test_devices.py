"""The whole engine on simulated devices: the CPU reference's tokens, the same bits wherever everything is placed."""

import numpy as np
import pytest
from device_models import greedy, needs, on_devices, options_for

from glm_gpu.engine import Engine

# Prompt and tokens of each model: past `index_topk` where there is one, and few, since a pass takes a second.
PROMPTS = {"tiny_glm": (20, 4), "tiny_olmoe": (24, 5), None: (70, 2)}
# A logit of 16-bit activations differs from the CPU's by this share of the largest one where both choose alike.
NOISE = 0.04


def sizes_of(placement: str, path) -> tuple[int, ...]:
    """Memory of each device for a placement by name."""
    need = needs(path)
    one, all_experts = need.kept_bytes + need.pass_bytes, need.num_experts * need.slot_bytes
    each = need.kept_bytes // 4 + need.pass_bytes
    return {
        "everything": (1 << 30,),
        "half": (one + all_experts // 2,),
        "few": (one + 6 * need.slot_bytes,),
        "two equal": (need.kept_bytes // 2 + need.pass_bytes + all_experts,) * 2,
        "two unequal, half": (one + all_experts // 8, one + all_experts * 3 // 8),
        "four unequal": tuple(need.kept_bytes + need.pass_bytes + n * all_experts // 8 for n in (1, 3, 1, 2)),
        "four, few": (each + need.kept_bytes // 8 + 8 * need.slot_bytes,) * 4,
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


@pytest.mark.parametrize("name", ["tiny_glm", "tiny_olmoe", None])
def test_tokens_are_the_cpu_s_wherever_its_margin_exceeds_16_bit_noise(runs, name):
    ids, logits, _ = runs(name, "everything")
    expected_ids, expected, _ = runs(name, "cpu")
    noise = NOISE * np.abs(expected).max()
    best = np.sort(expected, axis=1)
    is_clear = best[:, -1] - best[:, -2] > noise
    assert is_clear.mean() > 0.5
    assert (logits.argmax(axis=1) == expected.argmax(axis=1))[is_clear].all()
    assert np.median(np.abs(logits - expected)) < noise / 8
    if is_clear[-len(ids) :].all():
        assert ids == expected_ids


@pytest.mark.parametrize("placement", ["half", "few", "two equal", "two unequal, half", "four unequal", "four, few"])
@pytest.mark.parametrize("name", ["tiny_glm", "tiny_olmoe"])
def test_bits_are_the_same_wherever_experts_and_layers_are(runs, name, placement):
    ids, logits, _ = runs(name, "everything")
    found_ids, found, _ = runs(name, placement)
    assert found_ids == ids
    assert np.array_equal(found, logits)
