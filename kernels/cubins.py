"""Triton kernels as machine code for one architecture: compiled once, kept in a folder, read without Triton.

A file of the folder is named after everything that its content follows from: the kernels' source, the function, types,
alignments, constants, schedule and architecture. Files compiled by this user lie in a subfolder named after the
compiler (Triton's version and the ptxas settings); files that came with an installation lie in a folder of their own
and serve whatever compiler is there, or none.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from glm_gpu.errors import DeviceError
from glm_gpu.kernels.gpu.arrays import Kernel
from glm_gpu.state import read_state, write_state

MIN_ARCH = 80
_KIND, _VERSION = "cubin", 1
_SOURCE = Path(__file__).parent / "gpu" / "source"
_COMPILER_SETTINGS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "PTXAS_OPTIONS")
# Compiling changes the environment and stdout of the process, so one thread does it at a time.
_compiling = threading.Lock()


@dataclass(frozen=True)
class Specialization:
    """One way in which a kernel is compiled.

    Attributes:
        kernel: the function and its schedule.
        types: run-time arguments in order: (name, Triton type such as "*bf16" or "i32").
        aligned: names of the pointers and offsets that are multiples of 16 bytes, which the code relies on.
        constants: compile-time arguments: (name, value).
    """

    kernel: Kernel
    types: tuple[tuple[str, str], ...]
    aligned: tuple[str, ...]
    constants: tuple[tuple[str, int | bool | str], ...]


@dataclass(frozen=True)
class Cubin:
    """Machine code and what a launch has to know of it.

    Attributes:
        image: bytes of the ELF file.
        name: the function in it.
        shared_bytes: dynamic shared memory of a program.
        num_warps: warps of a program.
    """

    image: bytes
    name: str
    shared_bytes: int
    num_warps: int


def cache_folder(environment: Mapping[str, str], platform: str) -> Path | None:
    """Where this user's compiled kernels go; None where nothing says, and then they are compiled in every run.

    Args:
        environment: as os.environ; XDG_CACHE_HOME, HOME and LOCALAPPDATA are looked at.
        platform: as sys.platform.

    Source: XDG base directory specification 0.8, which has relative paths ignored.
    """
    if platform == "win32":
        local = environment.get("LOCALAPPDATA", "")
        return Path(local) / "glm-gpu" / "kernels" if local else None
    xdg, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if xdg.startswith("/"):
        return Path(xdg) / "glm-gpu" / "kernels"
    return Path(home) / ".cache" / "glm-gpu" / "kernels" if home.startswith("/") else None


class CubinCache:
    """Finds a kernel's machine code, or has it compiled and keeps it.

    Args:
        arch: compute capability times ten: 80, 86, 89, 90, 100, 120.
        folder: where compiled kernels are kept; None to keep them nowhere.
        prebuilt: folders written by `export`, looked at first and never written.

    Raises:
        DeviceError: the architecture is older than 80.
    """

    def __init__(self, arch: int, folder: Path | None, prebuilt: Iterable[Path] = ()) -> None:
        if arch < MIN_ARCH:
            raise DeviceError(
                f"compute capability {arch // 10}.{arch % 10} found, expected 8.0 or newer; use --device cpu"
            )
        self.arch = arch
        self._folder = folder
        self._prebuilt = tuple(prebuilt)

    def get(self, specialization: Specialization) -> Cubin:
        """Machine code from a prebuilt folder, from this user's, or from Triton, in this order.

        Raises:
            DeviceError: it has to be compiled, and Triton is not installed or refuses.
        """
        name = file_name(specialization, self.arch)
        for folder in self._prebuilt:
            found = _read(folder / name)
            if found is not None:
                return found
        kept = None if self._folder is None else self._folder / _compiler_name() / name
        found = None if kept is None else _read(kept)
        if found is not None:
            return found
        cubin = compile_kernel(specialization, self.arch).cubin
        if kept is not None:
            with contextlib.suppress(OSError):  # a full or read-only disk costs the next start, not this one
                _write(kept, cubin)
        return cubin

    def export(self, specialization: Specialization, folder: Path) -> None:
        """Put a kernel into a folder that other machines can use as `prebuilt`.

        Raises:
            DeviceError: as in get.
            OSError: the folder cannot be written.
        """
        _write(folder / file_name(specialization, self.arch), self.get(specialization))


def file_name(specialization: Specialization, arch: int) -> str:
    """The name of a kernel's file in every folder."""
    kernel = specialization.kernel
    content = [
        _VERSION,
        _source_hash(),
        list(astuple(kernel)),
        specialization.types,
        specialization.aligned,
        specialization.constants,
        arch,
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return f"{kernel.name}.sm{arch}.{digest[:32]}.cubin"


def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCE.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compiler_name() -> str:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    settings = json.dumps([os.environ.get(name) for name in _COMPILER_SETTINGS])
    return f"triton-{version}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def _read(path: Path) -> Cubin | None:
    found = read_state(path, _KIND, _VERSION)
    if found is None:
        return None
    header, arrays = found
    name, shared_bytes, num_warps = (header.get(key) for key in ("name", "shared_bytes", "num_warps"))
    if "image" not in arrays or not isinstance(name, str) or not type(shared_bytes) is type(num_warps) is int:
        return None
    return Cubin(arrays["image"].tobytes(), name, shared_bytes, num_warps)


def _write(path: Path, cubin: Cubin) -> None:
    header = {"name": cubin.name, "shared_bytes": cubin.shared_bytes, "num_warps": cubin.num_warps}
    write_state(path, _KIND, _VERSION, header, {"image": np.frombuffer(cubin.image, np.uint8)})


@dataclass(frozen=True)
class Compiled:
    """A fresh compilation: the cubin, and the PTX that tests look at."""

    cubin: Cubin
    ptx: str


def compile_kernel(specialization: Specialization, arch: int) -> Compiled:
    """Have Triton (3.6 to 3.9) compile a kernel; needs no driver and no card.

    Raises:
        DeviceError: Triton is missing or refuses.
    """
    try:
        import triton  # noqa: F401
    except ImportError:
        raise DeviceError(
            f"{specialization.kernel.name} for compute capability {arch / 10} is not among the compiled kernels, and "
            "Triton is not installed; pip install 'triton>=3.6,<3.10'"
        ) from None
    noise = io.StringIO()
    with _compiling, _settings(arch), contextlib.redirect_stdout(noise):
        try:
            compiled = _compile(specialization, arch)
        except Exception as error:  # Triton and ptxas raise whatever they have
            reason = next((line for line in f"{error}".splitlines() if line.strip()), type(error).__name__)
            raise DeviceError(
                f"Triton cannot compile {specialization.kernel.name} for compute capability {arch / 10}: {reason}; "
                "try another Triton between 3.6 and 3.9"
            ) from error
    meta = compiled.metadata
    assert not meta.global_scratch_size and not meta.profile_scratch_size, f"{meta.name} wants scratch memory"
    assert meta.num_ctas == 1, f"{meta.name} wants {meta.num_ctas} blocks in a cluster"
    return Compiled(Cubin(compiled.asm["cubin"], meta.name, meta.shared, meta.num_warps), compiled.asm["ptx"])


@contextlib.contextmanager
def _settings(arch: int):
    """Triton's settings while it compiles: its own cache lies in a folder that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="glm-gpu-triton-") as folder:
        settings = {"TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1"}
        if arch == 90 and "TRITON_PTXAS_BLACKWELL_PATH" not in os.environ:
            # Triton 3.9 takes its newest ptxas for sm_90, whose code a CUDA 12 driver refuses (ELF ABI 8); the older
            # one's code (ABI 7) is taken by both.
            settings["TRITON_PTXAS_BLACKWELL_PATH"] = str(bundled_tool("ptxas"))
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def bundled_tool(name: str) -> Path:
    """A tool of CUDA that comes with Triton: ptxas, nvdisasm, cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _compile(specialization: Specialization, arch: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = specialization.kernel
    module = importlib.import_module(f"glm_gpu.kernels.gpu.source.{kernel.module}")
    function = getattr(module, kernel.name)
    constants = dict(specialization.constants)
    names = [name for name in function.arg_names if name not in constants]
    given = [name for name, _ in specialization.types]
    assert names == given, f"{kernel.name} takes {names}, given {given}"
    types = dict(specialization.types)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(function.arg_names)
        if name in specialization.aligned
    }
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    if kernel.max_registers is not None:
        options["maxnreg"] = kernel.max_registers
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
