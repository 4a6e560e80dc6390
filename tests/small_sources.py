"""Checkpoints to convert: a small model of awkward sizes, in BF16 or FP8, over several shards."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.recipe import tensor_class
from glm_gpu.safetensors_write import write_safetensors
from glm_gpu.tensors import expected_tensors

# 257 columns: odd, and a last block, group and byte that are not full. 130 rows: a block of 128 and one of 2.
# kv_a_proj has 512 + 64 = 576 rows: four and a half blocks.
AWKWARD_CONFIG = {
    "model_type": "glm_moe_dsa", "vocab_size": 67, "hidden_size": 257, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1e4},
    "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 33, "n_shared_experts": 1,
    "intermediate_size": 130, "mlp_layer_types": ["dense", "sparse"], "q_lora_rank": 31, "kv_lora_rank": 512,
    "qk_nope_head_dim": 5, "qk_rope_head_dim": 64, "v_head_dim": 7, "indexer_types": ["full", "shared"],
    "index_n_heads": 2, "index_head_dim": 65, "index_topk": 16, "num_nextn_predict_layers": 1,
    "eos_token_id": [66], "first_k_dense_replace": 1, "head_dim": 5,
}  # fmt: skip


def bf16(values: np.ndarray) -> np.ndarray:
    """Bit patterns of values cut to bf16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_fp8(name: str, shape: tuple[int, int], rng: np.random.Generator) -> list[tuple]:
    """A random FP8 weight in blocks of 128 x 128, and its scales."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    scales = rng.uniform(1e-4, 3e-3, grid).astype(np.float32)
    return [(name, "F8_E4M3", shape, codes), (name + "_scale_inv", "F32", grid, scales)]


def make_awkward_source(
    folder: Path, kind: str = "fp8", num_shards: int = 3, seed: int = 0, replace: dict | None = None
) -> Path:
    """A model of AWKWARD_CONFIG in a new folder, tensors dealt out over shards in order.

    Args:
        kind: "fp8" or "bf16".
        replace: entries for `write_safetensors` in place of those of a weight, by its name.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(AWKWARD_CONFIG))
    config = ModelConfig.from_dict(AWKWARD_CONFIG)
    rng = np.random.default_rng(seed)
    entries: list[tuple] = []
    for name, shape in expected_tensors(config).items():
        if replace and name in replace:
            entries += replace[name]
        elif name.endswith("e_score_correction_bias"):
            entries.append((name, "F32", shape, rng.normal(7, 0.12, shape).astype(np.float32)))
        elif kind == "fp8" and len(shape) == 2 and tensor_class(name, config) not in ("float", "embedding"):
            entries += as_fp8(name, shape, rng)
        else:
            entries.append((name, "BF16", shape, bf16(_awkward_rows(rng.normal(0, 0.05, shape)))))
    write_shards(folder, entries, num_shards)
    return folder


def write_shards(folder: Path, entries: list[tuple], num_shards: int) -> None:
    """Deal tensors out over shards in order, about equally many to each, with an index file."""
    weight_map = {}
    bounds = np.linspace(0, len(entries), num_shards + 1).astype(int)
    for number, (start, stop) in enumerate(pairwise(bounds), 1):
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        write_safetensors(folder / file, entries[start:stop])
        weight_map |= {entry[0]: file for entry in entries[start:stop]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _awkward_rows(values: np.ndarray) -> np.ndarray:
    """Make the first rows of a matrix zero, one huge outlier, tiny, and all negative."""
    if values.ndim == 2 and len(values) > 4:
        values[0] = 0
        values[1, 3] = 1e4
        values[2] = 1e-12
        values[3] = -np.abs(values[3])
    return values
