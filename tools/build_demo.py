"""Convert the trained demo model into the container that is bundled with the package.

    PYTHONPATH=. python tools/build_demo.py [MODEL_DIR] [OUT_DIR]

MODEL_DIR holds the BF16 checkpoint that tools/train_demo.py writes (default ../shared/demo/model), OUT_DIR defaults to
glm_gpu/demo. Formats and rounding are the converter's defaults.
"""

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.manifest import MANIFEST_FILE, Manifest

ROOT = Path(__file__).resolve().parent.parent


def build(model_dir: Path, out_dir: Path) -> None:
    """Write the container; files of an older one are replaced."""
    with tempfile.TemporaryDirectory() as folder:
        container = Path(folder) / "demo"
        with LocalSource(model_dir) as source:
            convert(source, container, ConvertSettings())
        # named after the model, not after the folder that its checkpoint happened to lie in
        manifest = dataclasses.replace(Manifest.open(container), source="glm-gpu-demo")
        (container / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        for shard in out_dir.glob("*.safetensors"):
            shard.unlink()
        shutil.copytree(container, out_dir, dirs_exist_ok=True)


if __name__ == "__main__":
    build(
        Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared/demo/model",
        Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "glm_gpu/demo",
    )
