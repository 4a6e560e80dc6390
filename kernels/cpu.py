"""The C kernels of this machine's best instruction set, or None; how many threads they run on.

Kernels read `active` at every call: the extension module, or None when it was not built (no compiler) or a test asked
for NumPy. Both give the same bits.
"""

from contextlib import contextmanager

from glm_gpu.machine import num_physical_cores

try:
    from glm_gpu.kernels import _cpu
except ImportError:  # a checkout without a build, or a wheel built without a C compiler
    _cpu = None
else:
    _cpu.set_threads(min(num_physical_cores(), 256))

active = _cpu


def implementation() -> str:
    """What the kernels run on now: "numpy", "base", "avx2", "avx512vnni", "amxint8" or "neondot"."""
    return "numpy" if active is None else active.implementation()


def available() -> list[str]:
    """What this machine can run, slowest first; always begins with "numpy"."""
    return ["numpy", *(_cpu.available() if _cpu else [])]


@contextmanager
def use(name: str):
    """Runs the kernels on another implementation inside a `with`; for tests and benches, not while a kernel runs.

    Raises:
        ValueError: the name is not in `available()`.
    """
    global active
    if name not in available():
        raise ValueError(f"kernels cannot run on {name!r} here; expected one of {', '.join(available())}")
    before = implementation()
    _select(name)
    try:
        yield
    finally:
        _select(before)


def set_threads(num_threads: int) -> None:
    """How many threads a kernel runs on, the caller among them: 1 to 256. NumPy ignores it. Waits for a running job."""
    if _cpu:
        _cpu.set_threads(num_threads)


def get_threads() -> int:
    """How many threads a kernel runs on; until set, the physical cores this process may use."""
    return _cpu.get_threads() if _cpu else 1


def _select(name: str) -> None:
    global active
    active = None if name == "numpy" else _cpu
    if active:
        active.select(name)
