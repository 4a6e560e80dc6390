"""Write a slice of GLM-5.2 with random weights (see `glm_gpu/bench/slice.py`).

python bench/make_slice.py --out slice --layers 4 --experts 96      6.8 GB
python bench/make_slice.py --out slice --layers 2 --experts 16      0.7 GB
"""

import argparse
from pathlib import Path

from glm_gpu.bench.slice import SliceShape, glm_config, write_slice


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a slice of GLM-5.2 with random weights.")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=1, help="how many of the layers have a dense MLP")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048, help="2048 is what the demo's tokenizer covers")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = SliceShape(args.layers, args.dense, args.experts, args.vocab)
    write_slice(
        args.out,
        glm_config(shape),
        args.seed,
        lambda name, done: print(f"{name}: {done / 1e9:.2f} GB so far", flush=True),
    )


if __name__ == "__main__":
    main()
