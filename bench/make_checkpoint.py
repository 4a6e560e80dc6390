"""Write a synthetic checkpoint with the tensor shapes of GLM-5.2, a few layers deep, FP8 or BF16.

    python bench/make_checkpoint.py OUT_DIR [--layers 4] [--experts 32] [--dtype fp8] [--shard-gb 2]

Names, types, shapes and block scales are those of zai-org/GLM-5.2-FP8; layers 0 to 2 are dense, the others sparse with
`--experts` of the 256 experts, and the draft layer is there. Weights are random bytes drawn once and repeated, streamed
to the disk: memory stays below 200 MB. No model: its words mean nothing.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.recipe import tensor_class
from glm_gpu.safetensors_write import tensor_nbytes, write_safetensors
from glm_gpu.tensors import expected_tensors

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16", "hidden_size": 6144,
    "vocab_size": 154880, "intermediate_size": 12288, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "head_dim": 192,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "rope_interleave": True,
    "max_position_embeddings": 1048576, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}  # fmt: skip
BLOCK = 128
_CHUNK_BYTES = 32 << 20


def entries(config: ModelConfig, is_fp8: bool, rng: np.random.Generator) -> Iterator[tuple]:
    """(name, dtype, shape, data) of every tensor, data a function that yields it in parts."""
    codes = rng.integers(0, 255, _CHUNK_BYTES, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38  # no NaN
    # bf16 patterns of magnitudes from 2^-9 to 2^-5
    patterns = rng.integers(0x3B00, 0x3D00, _CHUNK_BYTES // 2, dtype=np.uint16)
    patterns |= rng.integers(0, 2, len(patterns), dtype=np.uint16) << 15
    for name, shape in expected_tensors(config).items():
        if name.endswith("e_score_correction_bias"):
            yield name, "F32", shape, rng.normal(7, 0.12, shape).astype(np.float32)
        elif is_fp8 and _is_fp8(name, shape, config):
            yield name, "F8_E4M3", shape, partial(_repeated, codes, math.prod(shape))
            grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            yield name + "_scale_inv", "F32", grid, rng.uniform(5e-5, 3e-4, grid).astype(np.float32)
        else:
            yield name, "BF16", shape, partial(_repeated, patterns.view(np.uint8), 2 * math.prod(shape))


def _is_fp8(name: str, shape: tuple, config: ModelConfig) -> bool:
    return len(shape) == 2 and tensor_class(name, config) not in ("float", "embedding") and "eh_proj" not in name


def _repeated(data: np.ndarray, nbytes: int) -> Iterator[np.ndarray]:
    for begin in range(0, nbytes, len(data)):
        yield data[: min(len(data), nbytes - begin)]


def make_checkpoint(out: Path, num_layers: int, num_experts: int, is_fp8: bool, shard_bytes: int) -> int:
    """Write the checkpoint into a new folder; its bytes."""
    out.mkdir(parents=True)
    values = CONFIG | {"num_hidden_layers": num_layers, "n_routed_experts": num_experts}
    if is_fp8:
        values["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]
        }  # fmt: skip
    config = ModelConfig.from_dict(values)
    (out / "config.json").write_text(json.dumps(values, indent=1))
    shards: list[list[tuple]] = [[]]
    size = total = 0
    for entry in entries(config, is_fp8, np.random.default_rng(0)):
        nbytes = tensor_nbytes(entry[1], entry[2])
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += nbytes
        total += nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(out / file, shard)
        weight_map |= {entry[0]: file for entry in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--shard-gb", type=float, default=2.0, help="GB of a shard; the hub's have 5.4")
    arguments = parser.parse_args()
    began = time.perf_counter()
    total = make_checkpoint(
        arguments.out, arguments.layers, arguments.experts, arguments.dtype == "fp8", int(arguments.shard_gb * 1e9)
    )
    seconds = time.perf_counter() - began
    print(f"{arguments.out}: {total / 1e9:.2f} GB in {seconds:.0f} s, {total / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
