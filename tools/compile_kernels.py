"""Compile every kernel that a model needs on cards, into a folder that is used where there is no Triton.

PYTHONPATH=. python tools/compile_kernels.py MODEL FOLDER --arch 90
PYTHONPATH=. python bench/gpu.py --cubins FOLDER
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from glm_gpu.config import ModelConfig
from glm_gpu.kernels.cubins import CubinCache, Specialization
from glm_gpu.kernels.launch import Recorder
from glm_gpu.model.device_footprint import dry_run
from glm_gpu.recipe import Recipe
from glm_gpu.session import PREFILL_CHUNK

ARCHS = (80, 86, 89, 90, 100, 120)
# Rows of a pass between which launches change: plans of up to 128 pairs, tiles of 16 and 64 rows.
ROWS = (*range(1, 34), 64, 256, PREFILL_CHUNK)


def needed(config: ModelConfig, recipe: Recipe, scale_dtype: str) -> list[Specialization]:
    """Every way in which a model's passes launch kernels, short contexts and long ones."""
    recorder, with_mtp = Recorder(), config.mtp_layer is not None
    for num_rows in ROWS:
        for context in (num_rows, 4 * max(config.index_topk or 0, num_rows)):
            dry_run(config, num_rows, context, recorder, recipe, scale_dtype, with_mtp)
    return recorder.specializations


def export(specialization: Specialization, arch: int, folder: Path) -> None:
    CubinCache(arch, None).export(specialization, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with config.json")
    parser.add_argument("folder", type=Path, help="where the kernels go")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, help="compute capabilities times ten")
    parser.add_argument("--expert-bits", type=int, default=4)
    parser.add_argument("--dense-bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--scales", choices=["f32", "f16"], default="f32")
    given = parser.parse_args()
    recipe = Recipe.from_bits(given.expert_bits, given.dense_bits, given.group)
    kernels = needed(ModelConfig.open(given.model), recipe, given.scales)
    work = [(kernel, arch, given.folder) for arch in given.arch for kernel in kernels]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(export, *zip(*work, strict=True)))
    files = list(given.folder.glob("*.cubin"))
    print(f"{len(files)} kernels, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB in {given.folder}")


if __name__ == "__main__":
    main()
