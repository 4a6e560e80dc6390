"""Quantize the trained demo model into the container that is bundled with the package.

    PYTHONPATH=. python tools/build_demo.py [MODEL_DIR] [OUT_DIR]

MODEL_DIR holds the BF16 checkpoint that tools/train_demo.py writes (default ../shared/demo/model), OUT_DIR defaults to
glm_gpu/demo. Formats are the recipe's defaults. Experts come first, each as one run [gate, up, down, gate.qs, up.qs,
down.qs], then the other weights.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from glm_gpu import __version__
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.manifest import MANIFEST_FILE, Manifest, ShardRecord, StoredFormat, name_pattern
from glm_gpu.quant import QuantizedMatrix
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.safetensors_write import write_safetensors
from glm_gpu.slab import ROLES
from glm_gpu.stored import SCALES_SUFFIX
from glm_gpu.tensors import expected_tensors

ROOT = Path(__file__).resolve().parent.parent
SHARD = "model-00001-of-00001.safetensors"
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def container_tensors(checkpoint: Checkpoint, recipe: Recipe) -> Iterator[tuple]:
    """Every tensor of the container as `write_safetensors` takes it, in the container's order."""
    config = checkpoint.config
    shapes = expected_tensors(config)
    for layer in (*config.sparse_layers, config.mtp_layer):
        for expert in range(config.n_routed_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            names = [f"{prefix}.{role}_proj.weight" for role in ROLES]
            yield from _packed(
                {name: checkpoint.read_matrix(name, shapes[name], recipe.format_for(name, config)) for name in names}
            )
    for name, shape in shapes.items():
        if ".mlp.experts." in name:
            continue
        format = recipe.format_for(name, config)
        if format.is_packed:
            yield from _packed({name: checkpoint.read_matrix(name, shape, format)})
        else:
            yield name, "F32", shape, checkpoint.read_f32(name)


def _packed(matrices: dict[str, QuantizedMatrix]) -> Iterator[tuple]:
    for name, matrix in matrices.items():
        yield name, "U8", [matrix.data.nbytes], matrix.data
    for name, matrix in matrices.items():
        yield name + SCALES_SUFFIX, "F32", [matrix.scales.size], matrix.scales


def build(model_dir: Path, out_dir: Path) -> None:
    """Write shard, manifest and side files."""
    recipe = Recipe.default()
    out_dir.mkdir(parents=True, exist_ok=True)
    with Checkpoint.open(model_dir) as checkpoint:
        config = checkpoint.config
        written = write_safetensors(out_dir / SHARD, container_tensors(checkpoint, recipe), metadata={"format": "pt"})
        shapes = expected_tensors(config).items()
        packed = {name: shape for name, shape in shapes if recipe.format_for(name, config).is_packed}
    manifest = Manifest(
        tool=f"glm-gpu {__version__}",
        source="glm-gpu-demo",
        revision=None,
        classes={tensor_class(name, config): StoredFormat(recipe.format_for(name, config)) for name in packed},
        shapes={name_pattern(name): shape for name, shape in packed.items()},
        shards={SHARD: ShardRecord(written.nbytes, written.sha256)},
    )
    (out_dir / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    for name in SIDE_FILES:
        shutil.copyfile(model_dir / name, out_dir / name)
    print(f"{out_dir / SHARD}: {written.nbytes} bytes")


if __name__ == "__main__":
    defaults = [ROOT.parent / "shared/demo/model", ROOT / "glm_gpu/demo"]
    build(*[Path(given) for given in sys.argv[1:3]] + defaults[len(sys.argv) - 1 :])
