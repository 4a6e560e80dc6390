"""Row r of a pass has the same bits as the row alone, whatever is in the pass with it."""

import numpy as np
import pytest
from small_models import prefill

from glm_gpu.batch import Batch
from glm_gpu.kernels import cpu
from glm_gpu.recipe import Recipe

RECIPES = {
    "f32": Recipe.float32(),
    "bf16": Recipe.from_bits(16, 16, 64),
    "int8": Recipe.from_bits(8, 8, 64),
    "int4": Recipe.from_bits(4, 4, 0),
    "int4_g64": Recipe.default(),
    "int4_g128": Recipe.from_bits(4, 4, 128),
    "int2": Recipe.from_bits(2, 2, 64),
}


@pytest.mark.parametrize("is_bf16", [False, True], ids=["f32 cache", "bf16 cache"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("folder", ["tiny_glm", "tiny_olmoe"])
def test_a_prompt_s_rows_do_not_depend_on_how_it_is_cut(open_oracle, reference, folder, recipe, is_bf16):
    model = open_oracle(folder, RECIPES[recipe])
    ids = reference(f"{folder}/reference.npz")["input_ids"][:23].tolist()
    whole, _, _ = prefill(model, ids, is_bf16)
    for sizes in ([1] * 23, [3, 1, 17, 2]):
        cache, rows, start = model.new_cache(32, is_bf16), [], 0
        for size in sizes:
            part = Batch.of([(ids[start : start + size], cache)], "prefill", all_logits=True)
            rows.append(model.forward(part).logits)
            start += size
        assert np.array_equal(np.concatenate(rows), whole.logits)


@pytest.mark.parametrize("is_bf16", [False, True], ids=["f32 cache", "bf16 cache"])
@pytest.mark.parametrize("recipe", ["f32", "int4_g64"])
@pytest.mark.parametrize("folder", ["tiny_glm", "tiny_olmoe"])
def test_sequences_in_one_pass_do_not_see_each_other(open_oracle, reference, folder, recipe, is_bf16):
    model = open_oracle(folder, RECIPES[recipe])
    ids = reference(f"{folder}/reference.npz")["input_ids"].tolist()
    prompts = [ids[:30], ids[7:9], ids[20:61]]
    alone = [prefill(model, prompt, is_bf16)[0].logits for prompt in prompts]
    caches = [model.new_cache(64, is_bf16) for _ in prompts]
    first = Batch.of([(p[:-1], c) for p, c in zip(prompts, caches, strict=True)], "prefill", no_logits=True)
    assert model.forward(first).logits.shape == (0, model.config.vocab_size)
    last = model.forward(Batch.of([(p[-1:], c) for p, c in zip(prompts, caches, strict=True)], "decode"))
    assert np.array_equal(last.logits, [rows[-1] for rows in alone])


@pytest.mark.parametrize("implementation", cpu.available())
def test_logits_have_the_same_bits_on_every_implementation_and_thread_count(open_oracle, reference, implementation):
    model = open_oracle("tiny_glm", Recipe.default())
    ids = reference("tiny_glm/reference.npz")["input_ids"][:40]
    with cpu.use("numpy"):
        expected = prefill(model, ids, is_bf16=True)[0].logits
    threads = cpu.get_threads()
    try:
        for num_threads in (1, 2, 3):
            cpu.set_threads(num_threads)
            with cpu.use(implementation):
                assert np.array_equal(prefill(model, ids, is_bf16=True)[0].logits, expected)
    finally:
        cpu.set_threads(threads)


def test_a_truncated_cache_continues_as_if_the_rest_had_never_been(tiny_glm, reference):
    ids = reference("tiny_glm/reference.npz")["input_ids"].tolist()
    fresh = prefill(tiny_glm, ids[:20])[0].logits[-1]
    _, cache, _ = prefill(tiny_glm, [*ids[:12], *ids[40:60]])
    cache.truncate(12)
    continued = tiny_glm.forward(Batch.of([(ids[12:20], cache)], "prefill")).logits[0]
    assert np.array_equal(continued, fresh)
