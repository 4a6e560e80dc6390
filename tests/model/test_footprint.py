"""A pass's memory told from shapes against what NumPy allocates."""

import numpy as np
import pytest
from peak_memory import peak_bytes
from small_models import open_model

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.kernels import cpu
from glm_gpu.model.footprint import pass_bytes

GLM_5_2 = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "max_position_embeddings": 1048576, "rope_parameters": {"rope_theta": 8000000}, "eos_token_id": [154820],
}  # fmt: skip


@pytest.mark.parametrize("model", ["tiny_glm", "tiny_olmoe"])
@pytest.mark.parametrize(("num_rows", "context"), [(1, 40), (16, 64), (48, 48)])
def test_a_pass_allocates_no_more_than_told_and_not_far_less(oracle_dir, model, num_rows, context):
    transformer = open_model(oracle_dir / model)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, transformer.config.vocab_size, context).tolist()
    cache = transformer.new_cache(context, is_bf16=False)
    with cpu.use("numpy"):
        if context > num_rows:
            transformer.forward(Batch.of([(ids[:-num_rows], cache)], "prefill"))
        batch = Batch.of([(ids[-num_rows:], cache)], "prefill", all_logits=True)
        told = pass_bytes(transformer.config, num_rows, context, is_numpy=True)

        def run_pass():
            cache.truncate(context - num_rows)
            transformer.forward(batch)

        bound = told + 20_000  # Python's own objects
        peak = peak_bytes(run_pass, bound)
    assert peak <= bound
    assert peak >= 0.1 * told


def test_experts_decide_at_short_contexts_and_index_scores_at_long_ones():
    """GLM-5.2's widths: 512 rows hold 8 results of 6,144 values each, or a score for every position."""
    config = ModelConfig.from_dict(GLM_5_2)
    short, longest = pass_bytes(config, 512, 2048), pass_bytes(config, 512, 1 << 20)
    assert short > 512 * 8 * 4 * 6144 * 4
    assert short == pass_bytes(config, 512, 8192)
    assert longest > 2 * 512 * (1 << 20) * 4
    assert pass_bytes(config, 1, 2048, all_logits=False) < short / 400
