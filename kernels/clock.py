"""How much of a program's time is spent in the C kernels, kernel by kernel."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glm_gpu.kernels import cpu


class KernelClock:
    """Stands in for the C extension and adds up the seconds that one thread spends in each kernel.

    A call costs 0.1 us more than without it. What other threads call is not counted: they quantize what they read.

    Attributes:
        by_kernel: seconds so far, by the kernel's name.
    """

    def __init__(self, extension: Any) -> None:
        self.by_kernel: dict[str, float] = {}
        self._extension, self._thread = extension, threading.get_ident()

    @property
    def seconds(self) -> float:
        """In all kernels together."""
        return sum(self.by_kernel.values())

    def __getattr__(self, name: str) -> Any:
        function, by_kernel, thread = getattr(self._extension, name), self.by_kernel, self._thread
        if not callable(function):
            return function

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            if threading.get_ident() == thread:
                by_kernel[name] = by_kernel.get(name, 0.0) + time.perf_counter() - began
            return result

        setattr(self, name, timed)  # from now on without this detour
        return timed


@contextmanager
def timed_kernels() -> Iterator[KernelClock | None]:
    """Times what this thread spends in the kernels inside a `with`; None where they run on NumPy."""
    if cpu.active is None:
        yield None
        return
    extension = cpu.active
    cpu.active = clock = KernelClock(extension)
    try:
        yield clock
    finally:
        cpu.active = extension
