"""Write a slice of GLM-5.2: real dimensions of every matrix, few layers, random weights, as a container.

Time and bytes a layer are those of the whole model; only the number of layers, the vocabulary and, if asked, the
number of experts are cut. Every tensor's bytes come from (seed, name) alone. Tensors are streamed to disk.

Routing is skewed and repeatable: router logits have a standard deviation of 1, and the correction bias, 7 on average,
one of 0.04 between experts, which gives a popularity close to GLM-5.2's (a tenth of the experts take a third of the
choices).

    python bench/make_slice.py --out slice --layers 4 --experts 128     9 GB
    python bench/make_slice.py --out slice --layers 2 --experts 16      0.7 GB
"""

import argparse
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from glm_gpu import __version__
from glm_gpu.config import ModelConfig
from glm_gpu.manifest import MANIFEST_FILE, Manifest, ShardRecord, StoredFormat, name_pattern
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.safetensors_write import write_safetensors
from glm_gpu.stored import SCALES_SUFFIX
from glm_gpu.tensors import expected_tensors

PIECE_BYTES = 16 << 20
# Random bytes with the least integer, -8 or -128, turned into 0. Without that the mean of a matrix would not be zero,
# every output would share one direction, and all tokens would choose the same experts.
_BYTES = np.arange(256, dtype=np.uint8)
_LOW, _HIGH = _BYTES & 15, _BYTES >> 4
SYMMETRIC = {
    4: np.where(_LOW == 0, 8, _LOW) | (np.where(_HIGH == 0, 8, _HIGH) << 4).astype(np.uint8),
    8: np.where(_BYTES == 128, 0, _BYTES),
}
# Their root mean square.
SPREAD = {4: 4.18, 8: 73.6}


def glm_config(num_layers: int, num_dense: int, num_experts: int, vocab_size: int) -> dict:
    """GLM-5.2's config.json with other counts."""
    full = [layer < 3 or (layer - 2) % 4 == 0 for layer in range(num_layers)]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "hidden_act": "silu",
        "num_hidden_layers": num_layers, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
        "indexer_types": ["full" if is_full else "shared" for is_full in full],
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
        "n_routed_experts": num_experts, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576, "vocab_size": vocab_size, "tie_word_embeddings": False,
        "eos_token_id": [vocab_size - 1],
    }  # fmt: skip


class Slice:
    """The tensors of a slice: their order, types, and how each one's bytes are made."""

    def __init__(self, config: ModelConfig, recipe: Recipe, seed: int) -> None:
        self.config, self.recipe, self.seed = config, recipe, seed
        self.shapes = expected_tensors(config)

    def tensors(self, prefix: str) -> Iterator[tuple[str, str, tuple[int, ...], Callable]]:
        """What `write_safetensors` takes, of all weights below a prefix: experts first, each as one run."""
        names = [name for name in self.shapes if name.startswith(prefix)]
        experts = [name for name in names if ".experts." in name]
        for start in range(0, len(experts), 3):
            run = experts[start : start + 3]
            yield from map(self._data, run)
            yield from map(self._scales, run)
        for name in names:
            if ".experts." in name:
                continue
            yield self._data(name)
            if self._format(name).is_packed:
                yield self._scales(name)

    def manifest(self, shards: dict[str, ShardRecord]) -> Manifest:
        packed = [name for name in self.shapes if self._format(name).is_packed]
        classes = {tensor_class(name, self.config): StoredFormat(self._format(name)) for name in packed}
        shapes = {name_pattern(name): self.shapes[name] for name in packed}
        return Manifest(f"glm-gpu {__version__}", "random", None, classes, shapes, shards)

    def _format(self, name: str):
        return self.recipe.format_for(name, self.config)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))

    def _data(self, name: str):
        shape, format = self.shapes[name], self._format(name)
        if not format.is_packed:
            return name, "F32", shape, lambda: self._floats(name, shape)
        num_bytes = format.data_nbytes(*shape)
        return name, "U8", (num_bytes,), lambda: self._pieces(name, num_bytes, SYMMETRIC[format.bits])

    def _scales(self, name: str):
        format, (num_rows, num_columns) = self._format(name), self.shapes[name]
        count = format.scale_count(num_rows, num_columns)
        base = np.float32((1.0 if "embed_tokens" in name else num_columns**-0.5) / SPREAD[format.bits])

        def make() -> np.ndarray:
            return base * self._rng(name + SCALES_SUFFIX).uniform(0.75, 1.25, count).astype(np.float32)

        return name + SCALES_SUFFIX, "F32", (count,), make

    def _pieces(self, name: str, num_bytes: int, table: np.ndarray) -> Iterator[np.ndarray]:
        rng = self._rng(name)
        for start in range(0, num_bytes, PIECE_BYTES):
            yield table[np.frombuffer(rng.bytes(min(PIECE_BYTES, num_bytes - start)), np.uint8)]

    def _floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = self._rng(name).standard_normal(shape, np.float32)
        if name.endswith("e_score_correction_bias"):
            return 7 + np.float32(0.04) * values
        if len(shape) == 2:
            return values * np.float32(shape[1] ** -0.5)
        return np.float32(name.endswith("weight")) + np.float32(0.1) * values


def write_slice(out: Path, num_layers: int, num_dense: int, num_experts: int, vocab_size: int, seed: int) -> None:
    """Write the container; the folder must be new or empty."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; name a new folder")
    values = glm_config(num_layers, num_dense, num_experts, vocab_size)
    made = Slice(ModelConfig.from_dict(values), Recipe.default(), seed)
    prefixes = [
        *(f"model.layers.{layer}." for layer in range(num_layers)),
        "model.embed_tokens",
        "model.norm",
        "lm_head",
    ]
    shards = {}
    for number, prefix in enumerate(prefixes, 1):
        name = f"model-{number:05d}-of-{len(prefixes):05d}.safetensors"
        written = write_safetensors(out / name, made.tensors(prefix))
        shards[name] = ShardRecord(written.nbytes, written.sha256)
        print(f"{name}: {sum(record.nbytes for record in shards.values()) / 1e9:.2f} GB so far", flush=True)
    (out / "config.json").write_text(json.dumps(values, indent=1))
    (out / MANIFEST_FILE).write_text(made.manifest(shards).to_json())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a slice of GLM-5.2 with random weights.")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=1, help="how many of the layers have a dense MLP")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write_slice(args.out, args.layers, args.dense, args.experts, args.vocab, args.seed)


if __name__ == "__main__":
    main()
