"""Which devices a run gets: --device, --gpu and --vram, against what the driver shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_gpu import machine
from glm_gpu.device import Device, DeviceInfo
from glm_gpu.errors import DeviceError, RequestError
from glm_gpu.kernels.cubins import MIN_ARCH
from glm_gpu.units import parse_bytes


def choose_gpus(asked: str | None, found: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """The devices that `--gpu` names, in that order; all when it is None.

    Args:
        asked: ordinals and beginnings of UUIDs, separated by commas, "0,GPU-5b31".

    Raises:
        RequestError: a name fits no device or several, or a device is named twice.
    """
    if asked is None:
        return list(found)
    chosen = []
    for name in (part.strip() for part in asked.split(",")):
        fitting = [info for info in found if _fits(name, info)]
        if len(fitting) != 1:
            known = "; ".join(map(str, found)) or "none"
            count = "no device" if not fitting else f"{len(fitting)} devices"
            raise RequestError(
                f"--gpu {name!r} fits {count}; give an ordinal or the beginning of a UUID. Found: {known}"
            )
        if fitting[0] in chosen:
            raise RequestError(f"--gpu {asked!r} names device {fitting[0].ordinal} twice")
        chosen += fitting
    return chosen


def _fits(name: str, info: DeviceInfo) -> bool:
    if name.isdecimal() and len(name) < 4:  # ordinals; longer ones can only be the beginning of a UUID
        return int(name) == info.ordinal
    bare = info.uuid.partition("-")[2]
    return bool(name) and (info.uuid.lower().startswith(name.lower()) or bare.lower().startswith(name.lower()))


def vram_bounds(asked: str | None, num_devices: int) -> list[int | None]:
    """What `--vram` allows each device; None without a bound.

    Args:
        asked: one size for all, or one for each, separated by commas.

    Raises:
        RequestError: a size is none, or there are neither one nor as many as devices.
    """
    if asked is None:
        return [None] * num_devices
    sizes = [parse_bytes(part) for part in asked.split(",")]
    if len(sizes) not in (1, num_devices):
        raise RequestError(f"--vram gives {len(sizes)} sizes for {num_devices} devices; give one, or one for each")
    return sizes * num_devices if len(sizes) == 1 else sizes


@dataclass(frozen=True)
class DeviceRequest:
    """What a run asks of devices.

    Attributes:
        kind: "auto", "cpu", "cuda" or "sim:N".
        gpu: as `choose_gpus` takes it.
        vram: as `vram_bounds` takes it.
        cubin_folder: where compiled kernels are kept; None to compile them in every run.
    """

    kind: str = "auto"
    gpu: str | None = None
    vram: str | None = None
    cubin_folder: Path | None = None

    @property
    def is_asked(self) -> bool:
        """Whether devices were asked for, and not just used where there are some."""
        return self.kind not in ("auto", "cpu") or self.gpu is not None

    @property
    def num_simulated(self) -> int:
        """N of "sim:N", 0 for other kinds.

        Raises:
            RequestError: the kind is not known.
        """
        if self.kind in ("auto", "cpu", "cuda"):
            return 0
        name, _, count = self.kind.partition(":")
        if name != "sim" or not count.isdecimal() or not 1 <= int(count) <= 16:
            raise RequestError(f"--device {self.kind!r} is not known; expected cpu, cuda, or sim:1 to sim:16")
        return int(count)


def open_devices(request: DeviceRequest) -> tuple[list[Device], str]:
    """The devices of a run, and why there are no others; none for a run on the CPU.

    With "auto" whatever is missing (packages, driver, cards) leads to the CPU.

    Raises:
        DeviceError: "cuda" or a GPU was asked for and cannot be had.
        RequestError: the request contradicts itself or what there is.
    """
    if request.num_simulated:
        from glm_gpu.device_sim import DEFAULT_BYTES, SimDevice

        bounds = vram_bounds(request.vram, request.num_simulated)
        return [SimDevice(n, DEFAULT_BYTES if bound is None else bound) for n, bound in enumerate(bounds)], ""
    if request.kind == "cpu":
        return [], "--device cpu"
    absence = machine.gpu_absence()
    # Where nothing is there CuPy need not be imported to learn it. WSL has no /proc/driver; there CUDA alone knows.
    if absence and not request.is_asked and not Path("/dev/dxg").exists():
        return [], absence
    from glm_gpu.device_cuda import CudaDevice, find_gpus

    found, reason = find_gpus()
    chosen = choose_gpus(request.gpu, found) if found else []
    old = [info for info in chosen if info.arch < MIN_ARCH]
    if old:
        reason = f"{old[0].name} has compute capability {old[0].arch / 10}, expected 8.0 or newer"
        chosen = [] if request.is_asked else [info for info in chosen if info.arch >= MIN_ARCH]
    if not chosen:
        if request.is_asked:
            raise DeviceError(f"no GPU can be used: {reason}; use --device cpu, or see `glm-gpu doctor`")
        return [], reason
    bounds = vram_bounds(request.vram, len(chosen))
    folder = request.cubin_folder
    return [CudaDevice(info, bound, folder) for info, bound in zip(chosen, bounds, strict=True)], reason
