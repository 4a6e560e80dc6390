"""A slice of GLM-5.2 on disk: real dimensions of every matrix, few layers, random weights, as a container.

Time and bytes a layer are those of the whole model; only the number of layers, the vocabulary and the number of experts
are cut. Every tensor's bytes come from (seed, name) alone. Tensors are streamed to disk.

Routing is skewed and repeatable: router logits have a standard deviation of 1, and the correction bias, 7 on average,
one of 0.04 between experts, which gives a popularity close to GLM-5.2's (a tenth of the experts take a third of the
choices). The tokenizer is the demo model's.
"""

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm_gpu import __version__
from glm_gpu.config import ModelConfig
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.errors import CapacityError, RequestError
from glm_gpu.machine import disk_free_bytes
from glm_gpu.manifest import MANIFEST_FILE, Manifest, ShardRecord, StoredFormat, name_pattern
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.safetensors_write import tensor_nbytes, write_safetensors
from glm_gpu.stored import SCALES_SUFFIX
from glm_gpu.tensors import expected_tensors
from glm_gpu.units import format_bytes

PIECE_BYTES = 16 << 20
# Left free on the disk, so that nothing else that writes there fails.
FREE_BYTES = 1 << 30
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


@dataclass(frozen=True)
class SliceShape:
    """What is cut from GLM-5.2: layers, how many of them have a dense MLP, experts of a layer, and the vocabulary."""

    num_layers: int = 3
    num_dense: int = 1
    num_experts: int = 64
    vocab_size: int = 2048

    @property
    def about_bytes(self) -> int:
        """Roughly what it takes: 21 MB an expert, 150 MB of the rest of a layer, embeddings."""
        num_sparse = self.num_layers - self.num_dense
        return 21_300_000 * num_sparse * self.num_experts + 150_000_000 * self.num_layers + 12_300 * self.vocab_size


def glm_config(shape: SliceShape) -> dict:
    """GLM-5.2's config.json with other counts."""
    num_layers, vocab_size = shape.num_layers, shape.vocab_size
    full = [layer < 3 or (layer - 2) % 4 == 0 for layer in range(num_layers)]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "hidden_act": "silu",
        "num_hidden_layers": num_layers, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
        "indexer_types": ["full" if is_full else "shared" for is_full in full],
        "mlp_layer_types": ["dense"] * shape.num_dense + ["sparse"] * (num_layers - shape.num_dense),
        "n_routed_experts": shape.num_experts, "num_experts_per_tok": 8, "n_shared_experts": 1,
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


def write_slice(
    out: Path, values: dict, seed: int = 1, on_shard: Callable[[str, int], None] = lambda name, done_bytes: None
) -> int:
    """Write the container into a new or empty folder; how many bytes it has.

    Args:
        values: its config.json, as `glm_config` makes it.
        on_shard: told of each finished shard, and the bytes written so far.

    Raises:
        RequestError: the folder holds something.
        CapacityError: the disk has no room; nothing was written.
    """
    if out.exists() and any(out.iterdir()):
        raise RequestError(f"{out} is not empty; name a new folder")
    config = ModelConfig.from_dict(values)
    made = Slice(config, Recipe.default(), seed)
    layers = [f"model.layers.{n}." for n in range(config.num_hidden_layers)]
    prefixes = [*layers, "model.embed_tokens", "model.norm", "lm_head"]
    need = sum(tensor_nbytes(*entry[1:3]) for prefix in prefixes for entry in made.tensors(prefix))
    out.mkdir(parents=True, exist_ok=True)
    if (free := disk_free_bytes(out)) < need + FREE_BYTES:
        raise CapacityError(
            f"{out}: a slice takes {format_bytes(need)} and {format_bytes(free)} are free, of which "
            f"{format_bytes(FREE_BYTES)} should stay so; name another disk or fewer experts"
        )
    shards = {}
    for number, prefix in enumerate(prefixes, 1):
        name = f"model-{number:05d}-of-{len(prefixes):05d}.safetensors"
        written = write_safetensors(out / name, made.tensors(prefix))
        shards[name] = ShardRecord(written.nbytes, written.sha256)
        on_shard(name, sum(record.nbytes for record in shards.values()))
    (out / "config.json").write_text(json.dumps(values, indent=1))
    (out / MANIFEST_FILE).write_text(made.manifest(shards).to_json())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO_MODEL / name, out / name)
    return sum(record.nbytes for record in shards.values())


@contextmanager
def temporary_slice(folder: Path, shape: SliceShape) -> Iterator[Path]:
    """A slice in a new folder below `folder`, removed at the end.

    Raises:
        CapacityError: the disk has no room.
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="glm-gpu-slice-", dir=folder) as name:
        write_slice(Path(name), glm_config(shape))
        yield Path(name)
