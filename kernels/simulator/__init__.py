"""A device made of this process's memory, on which the kernels' Triton source runs as NumPy.

Neither Triton nor a card is needed. Arithmetic is that of the types (bf16 and f16 rounded to nearest even, f32 sums),
but not bit for bit that of a card, whose tensor cores add in an order of their own.
"""

import builtins
import threading
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from glm_gpu.kernels.gpu.arrays import ITEM_BYTES, Kernel, num_items
from glm_gpu.kernels.simulator import language
from glm_gpu.kernels.simulator.memory import Memory, MemoryFault, Region, Regions
from glm_gpu.kernels.simulator.values import Divergent, PointerType, Tensor

__all__ = ["MemoryFault", "Simulator"]

_SOURCE = Path(__file__).parents[1] / "gpu" / "source"
_PACKAGE = "glm_gpu.kernels.gpu.source."
_TYPES = {
    "f32": language.float32,
    "bf16": language.bfloat16,
    "f16": language.float16,
    "i8": language.int8,
    "u8": language.uint8,
    "u16": language.uint16,
    "u32": language.uint32,
    "i32": language.int32,
    "i64": language.int64,
    "u64": language.uint64,
}
# Programs that run together: enough to hide Python, and few enough that their blocks stay in the cache.
_TOGETHER = 64


class Simulator:
    """Launches kernels on memory of this process; a launch has happened when it returns.

    Args:
        regions: gives (begin, bytes) of all memory that addresses from tables may reach; None lets them reach anything.
            Arrays given as arguments are always held to their own bounds.
        is_checked: look for races, and for assembly that is not elementwise; several times slower.
    """

    def __init__(self, regions: Regions | None = None, is_checked: bool = False) -> None:
        self._regions = regions
        self._is_checked = is_checked

    def launch(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """As Launcher.launch.

        Raises:
            MemoryFault: the kernel touches memory that it may not, or races.
        """
        grid = (*grid, 1, 1)[:3]
        if 0 in grid:
            return
        function = getattr(_module(kernel.module), kernel.name)
        values = {name: _argument(value) for name, value in arguments.items()}
        memory = Memory(self._regions, self._is_checked)
        # the last axis runs fastest, so that neighbours mostly take the same way
        ids = np.indices(grid).reshape(3, -1).T
        with np.errstate(all="ignore"):  # as on a card: infinities, NaN and wrapped integers are values
            for start in range(0, len(ids), _TOGETHER):
                self._run(function, values | constants, grid, ids[start : start + _TOGETHER], memory)
        memory.finish()

    def _run(self, function, values, grid, ids, memory) -> None:
        waiting = [ids]
        while waiting:
            ids = waiting.pop()
            memory.mark()
            language.current.run = language.Run(grid, ids, memory, self._is_checked)
            try:
                function(**values)
            except Divergent as divergent:
                memory.rewind()
                waiting += [ids[divergent.values == value] for value in np.unique(divergent.values)]


def _argument(value) -> Tensor:
    if value is None:
        return Tensor(np.zeros(1, np.int64), PointerType(language.float32), Region(0, 0))
    if isinstance(value, np.int64):
        return Tensor(np.array([value]), language.int64)
    if isinstance(value, int):
        return Tensor(np.array([value], np.int32), language.int32)
    if isinstance(value, float):
        return Tensor(np.array([value], np.float32), language.float32)
    size = ITEM_BYTES[value.dtype]
    if value.ptr % size:
        raise MemoryFault(f"an array of {value.dtype} begins at {value.ptr:#x}, no multiple of its items' size")
    region = Region(value.ptr, num_items(value.shape) * size)
    return Tensor(np.array([value.ptr], np.int64), PointerType(_TYPES[value.dtype]), region)


_loading = threading.RLock()
_triton = SimpleNamespace(jit=lambda function: function, language=language, cdiv=language.cdiv)


def _module(name: str) -> ModuleType:
    with _loading:
        return _load(name)


@cache
def _load(name: str) -> ModuleType:
    """A file of kernels, run with the simulated language in the place of Triton."""
    path = _SOURCE / f"{name}.py"
    module = ModuleType(f"simulated {name}")
    module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def _import(name, globals=None, locals=None, fromlist=(), level=0):
    if name.split(".")[0] == "triton":
        return _triton
    assert name.startswith(_PACKAGE) and fromlist, f"kernels import Triton and each other, not {name}"
    return _load(name.removeprefix(_PACKAGE))
