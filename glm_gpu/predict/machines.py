"""Described machines: a TOML or JSON file that says what a computer has, so that nobody has to own it.

cores = 8                     physical
ram = "64GiB"                 all of it; used = "4GiB" of that by the system and other programs
memory_gb_s = 60              reads of all cores together, as `glm-gpu bench kernels` finds them;
                              about 80 % of channels x 8 bytes x transfers a second
disk_gb_s = 5.0               experts of 20 MB read past the page cache, several at once: `glm-gpu bench io`
disk_latency_ms = 0.3         of the first of them; default 0.3
core_gmac_s = 45              10^9 multiply-adds a second that a core gets through with experts in a prompt's pass;
                              default 45, as with AVX-512 VNNI; half of it with AVX2

[[gpus]]                      one table a card, or count = 4 of the same
vram = "24GiB"
memory_gb_s = 1008            of its own memory
copy_gb_s = 25                from RAM to it, page-locked
tflops = 165                  dense bf16 or f16 on tensor cores
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_gpu.errors import CheckpointError, GlmGpuError, RequestError
from glm_gpu.json_file import parse_json_object
from glm_gpu.units import parse_bytes

SHIPPED = Path(__file__).with_name("machines")
_MAX_BYTES = 1 << 20
# What a system with a desktop takes.
_USED_BYTES = 2 << 30
_LARGEST = {"cores": 4096, "count": 64}


@dataclass(frozen=True)
class Gpu:
    """One card. Units as in the file."""

    vram_bytes: int
    memory_gb_s: float
    copy_gb_s: float
    tflops: float


@dataclass(frozen=True)
class Machine:
    """A described machine. Units as in the file; `name` is the file's."""

    name: str
    cores: int
    ram_bytes: int
    memory_gb_s: float
    disk_gb_s: float
    used_bytes: int = _USED_BYTES
    disk_latency_ms: float = 0.3
    core_gmac_s: float | None = None
    gpus: tuple[Gpu, ...] = field(default=())


def shipped_machines() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def open_machine(name_or_file: str) -> Machine:
    """A shipped machine by its name, or the one that a file describes.

    Raises:
        RequestError: no such name or file, or the file is no description of a machine.
    """
    if name_or_file in shipped_machines():
        return parse_machine(_read(SHIPPED / f"{name_or_file}.toml"), name_or_file, name_or_file)
    path = Path(name_or_file)
    if not path.is_file():
        raise RequestError(
            f"--machine {name_or_file}: no such file or machine; give a .toml or .json file, or one of "
            + ", ".join(shipped_machines())
        )
    return parse_machine(_read(path), str(path), path.stem)


def parse_machine(values: dict[str, Any], where: str, name: str) -> Machine:
    """The machine that a parsed file describes; `where` names it in messages. Raises as `open_machine` does."""
    fields = _Fields(values, where)
    gpus: list[Gpu] = []
    tables = values.get("gpus", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RequestError(f"{where}: gpus is {type(tables).__name__}, expected a list of tables; write [[gpus]]")
    for number, table in enumerate(tables):
        card = _Fields(table, f"{where}: gpus[{number}]")
        gpu = Gpu(card.size("vram"), card.rate("memory_gb_s"), card.rate("copy_gb_s"), card.rate("tflops"))
        gpus += [gpu] * card.count("count", 1)
        card.finish()
    fields.seen.add("gpus")
    machine = Machine(
        name,
        fields.count("cores"),
        fields.size("ram"),
        fields.rate("memory_gb_s"),
        fields.rate("disk_gb_s"),
        fields.size("used", _USED_BYTES),
        fields.rate("disk_latency_ms", Machine.disk_latency_ms),
        fields.rate("core_gmac_s", None),
        tuple(gpus),
    )
    fields.finish()
    if machine.used_bytes >= machine.ram_bytes:
        raise RequestError(f"{where}: used is {machine.used_bytes} bytes of ram {machine.ram_bytes}; expected less")
    return machine


_REQUIRED: Any = object()


class _Fields:
    """Takes fields out of a table, each once, and names what is wrong with it."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self.seen: set[str] = set()

    def rate(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def count(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST[name]:
            raise self._wrong(name, value, f"a whole number from 1 to {_LARGEST[name]}")
        return value

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._take(name, default)
        if value is default:
            return value
        try:
            num_bytes = parse_bytes(value) if isinstance(value, str) else 0
        except RequestError:
            num_bytes = 0
        if num_bytes <= 0:
            raise self._wrong(name, value, 'a size in quotes, as in "64GiB"')
        return num_bytes

    def finish(self) -> None:
        """Refuse what nobody asked for: a misspelt field would otherwise do nothing."""
        unknown = sorted(set(self._values) - self.seen)
        if unknown:
            raise RequestError(
                f"{self._where}: {unknown[0]} is no field of a machine; expected {', '.join(sorted(self.seen))}"
            )

    def _take(self, name: str, default: Any) -> Any:
        self.seen.add(name)
        if name not in self._values and default is _REQUIRED:
            raise RequestError(f"{self._where}: {name} is missing; glm_gpu/predict/machines.py says what it means")
        return self._values.get(name, default)

    def _wrong(self, name: str, value: Any, expected: str) -> RequestError:
        return RequestError(f"{self._where}: {name} is {value!r:.40}, expected {expected}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise RequestError(f"{path}: larger than {_MAX_BYTES} bytes; this describes no machine")
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); give another file") from None
    try:
        return parse_json_object(data, str(path)) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not valid TOML ({error}); a JSON file is named .json") from None
    except CheckpointError as error:
        raise _without_advice(error) from None


def _without_advice(error: GlmGpuError) -> RequestError:
    return RequestError(str(error).partition("; ")[0] + "; correct the file")
