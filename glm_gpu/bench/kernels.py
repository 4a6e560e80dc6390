"""`glm-gpu bench kernels`: each kernel beside the limit, which is measured just before and just after each sample."""

import statistics
from dataclasses import replace

from glm_gpu.bench.kernel_cases import Bound, Case, cases, many_tokens
from glm_gpu.bench.measurement import Limit, Part, seconds
from glm_gpu.kernels import cpu
from glm_gpu.kernels.limits import integer_multiply_adds_s, multiply_add_flops, read_bytes_s
from glm_gpu.machine import memory

MEMORY_BYTES = 1 << 30
# Identical measurements of a row, each beside the limit: enough for medians and a spread where others use the machine.
REPEATS = 5
UNITS: dict[Bound, tuple[str, str]] = {
    "memory": ("GB/s", "memory read"),
    "int16": ("GMAC/s", "int16 products"),
    "f32": ("GFLOP/s", "f32 products and sums"),
}


def measure_kernels(is_quick: bool = False) -> Part:
    """Every kernel at GLM-5.2's sizes.

    Raises:
        DeviceError: the C extension is not in use.
    """
    memory_bytes = min(MEMORY_BYTES, memory().available // 4) // (4 if is_quick else 1)
    part = Part("kernels", f"GLM-5.2's sizes, {memory_bytes / 2**30:.2g} GiB of distinct weights a row")
    for case in cases(memory_bytes):
        measure_case(part, case, memory_bytes)
    for name in cpu.available():
        # the instruction sets that other machines have, each against its own product instruction
        if name not in ("numpy", "base", cpu.implementation()):
            with cpu.use(name):
                case = many_tokens()
                measure_case(part, replace(case, name=f"{case.name}, {name}"), memory_bytes)
    return part


def measure_case(part: Part, case: Case, memory_bytes: int) -> None:
    """Add a case's row. Each sample is the median of a fifth of the calls; the limit is taken before and behind."""
    case.call(0)
    samples, limits = [], []
    for repeat in range(REPEATS):
        each = max(3, case.num_calls // REPEATS)
        before = _limit(case.bound, memory_bytes)
        times = [seconds(lambda i=i: case.call(i)) for i in range(repeat * each, (repeat + 1) * each)]
        samples.append(statistics.median(times))
        limits.append(max(before, _limit(case.bound, memory_bytes)))
    if case.bound is None:
        part.add(case.name, (1e3 * sample for sample in samples), "ms")
        return
    unit, name = UNITS[case.bound]
    rates = (case.amount / sample / 1e9 for sample in samples)
    limit = Limit(statistics.median(limits), name)
    part.add(case.name, rates, unit, limit, median_ms=1e3 * statistics.median(samples))


def _limit(bound: Bound | None, memory_bytes: int) -> float:
    """What the machine does at best now, in 10^9 a second."""
    if bound is None:
        return 0.0
    if bound == "memory":
        return read_bytes_s(memory_bytes) / 1e9
    return (integer_multiply_adds_s() if bound == "int16" else multiply_add_flops()) / 1e9
