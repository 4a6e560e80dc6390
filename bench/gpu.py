"""Check and measure everything that runs on a GPU, in less than eight minutes, and keep it in bench/results/gpu.json.

    PYTHONPATH=. python bench/gpu.py                      in a checkout on a machine with a GPU: checks, measures
    PYTHONPATH=. python bench/gpu.py --device sim:1 --quick     without one: shows that the script itself works

First the oracle's models and the demo run on the device and on the CPU, in every format that kernels multiply, and what
they say is compared. Then kernels at GLM-5.2's shapes, copies, launches and graphs, and a slice of GLM-5.2 with
different shares of its experts in VRAM. Needs NumPy, CuPy and Triton, or `--cubins FOLDER` with kernels compiled
elsewhere, in the place of Triton; no network. What does not fit the time left is named, not measured.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gpu_kernels
import gpu_models
import record

from glm_gpu.bench.measurement import Part
from glm_gpu.device import Device
from glm_gpu.device_choice import choose_gpus, vram_bounds
from glm_gpu.device_cuda import CudaDevice, find_gpus
from glm_gpu.device_sim import SimDevice
from glm_gpu.kernels.cubins import cache_folder
from glm_gpu.units import parse_bytes

LIMIT_S = 450.0


def main() -> int:
    """Run all stages; 1 when a check failed."""
    arguments = _arguments()
    began = time.perf_counter()
    opener = Opener(arguments)
    part = Part("gpu", str(opener.info))
    failures: list[str] = []
    stages: list[tuple[str, Callable[[], list[str] | None]]] = [
        ("models against the CPU", lambda: gpu_models.check(part, opener.open, arguments.quick)),
        ("copies", lambda: gpu_kernels.measure_copies(part, opener.open, arguments.quick)),
        ("launches and graphs", lambda: gpu_kernels.measure_launches(part, opener.open, arguments.quick)),
        ("kernels", lambda: gpu_kernels.measure(part, opener.open, arguments.quick)),
        ("a slice of GLM-5.2", lambda: _slice(part, opener, arguments)),
    ]
    for name, stage in stages:
        left_s = LIMIT_S - (time.perf_counter() - began)
        if left_s < 20:
            part.notes.append(f"{name}: not measured, the time was over")
            continue
        print(f"== {time.perf_counter() - began:4.0f} s  {name}", file=sys.stderr, flush=True)
        try:
            failures += stage() or []
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            print(failures[-1], file=sys.stderr)
    found = part.document() | {"device": opener.facts(), "failures": failures, "is_quick": arguments.quick}
    for row in part.rows:
        share = "" if row.share is None else f"{row.share:6.0%} of {row.limit.name}"
        print(f"{row.name:56}{row.median:12.4g} {row.unit:8}{share}")
    for line in (*part.notes, *failures):
        print(line)
    print("a quick run is not kept" if arguments.quick else record.save("gpu", found))
    return 1 if failures else 0


class Opener:
    """Opens the devices asked for, anew for each model, so that nothing of one is left for the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        if arguments.device.startswith("sim"):
            self.info, self._is_simulated = SimDevice(0, 0).info, True
            return
        found, reason = find_gpus()
        if not found:
            sys.exit(f"no GPU: {reason}; --device sim:1 --quick shows that the script works")
        self.info, self._is_simulated = choose_gpus(arguments.gpu, found)[0], False

    @contextmanager
    def open(self, vram: int | None = None, count: int = 1) -> Iterator[list[Device]]:
        """So many devices, on one card, each with at most `vram` bytes."""
        arguments = self._arguments
        if vram is None and arguments.vram is not None:
            vram = parse_bytes(arguments.vram)
        bounds = vram_bounds(None if vram is None else str(vram), count)
        devices: list[Device] = []
        for n, bound in enumerate(bounds):
            if self._is_simulated:
                devices.append(SimDevice(n, 4 << 30 if bound is None else bound))
            else:
                folder = cache_folder({"HOME": str(Path.home())}, sys.platform)
                devices.append(CudaDevice(self.info, bound, folder, [arguments.cubins] if arguments.cubins else []))
        try:
            yield devices
        finally:
            for device in devices:
                device.close()

    def facts(self) -> dict:
        """What figures depend on beside the machine."""
        facts = {"name": self.info.name, "arch": self.info.arch, "memory_bytes": self.info.total_bytes}
        if self._is_simulated:
            return facts | {"is_simulated": True}
        import cupy

        return facts | {"driver": cupy.cuda.runtime.driverGetVersion(), "cupy": cupy.__version__}


def _slice(part: Part, opener: Opener, arguments: argparse.Namespace) -> list[str]:
    if arguments.slice is not None:
        return gpu_models.measure_slice(part, opener.open, arguments.slice, arguments.quick)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        path = gpu_models.write_slice(Path(folder) / "slice", arguments.quick)
        return gpu_models.measure_slice(part, opener.open, path, arguments.quick)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or sim:1")
    parser.add_argument("--gpu", help="ordinal or beginning of a UUID; default: the first")
    parser.add_argument("--vram", help="most memory to use, as in 20GiB")
    parser.add_argument("--cubins", type=Path, help="folder of kernels compiled elsewhere")
    parser.add_argument("--slice", type=Path, help="a slice that bench/make_slice.py wrote; default: a small new one")
    parser.add_argument("--work", type=Path, help="folder for 5 GB of a new slice; default: the system's")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
