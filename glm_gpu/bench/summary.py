"""What the parts of a bench say about the whole of GLM-5.2: this machine as measured, through the simulator."""

import statistics

from glm_gpu.machine import read_machine
from glm_gpu.opening import EngineOptions
from glm_gpu.predict.machines import Machine
from glm_gpu.predict.prediction import Workload
from glm_gpu.predict.simulation import Simulation, simulate


def measured_machine(documents: list[dict]) -> Machine | None:
    """This machine as the parts found it; None where memory or disk could not be measured.

    Args:
        documents: of `io`, `kernels` and others, as `Part.document` gives them.
    """
    rows = {found["bench"]: found["rows"] for found in documents if "rows" in found}
    disk = [row for row in rows.get("io", []) if row.get("is_disk")]
    reads = [row["limit"] for row in rows.get("kernels", []) if row.get("limit_name") == "memory read"]
    products = [row["median"] for row in rows.get("kernels", []) if row["unit"] == "GMAC/s"]
    if not disk or not reads or not products:
        return None
    found = read_machine()
    best = max(row["median"] for row in disk)
    alone = max((row["median"] for row in disk if row["depth"] == 1), default=best)
    expert_bytes = disk[0]["expert_bytes"]
    return Machine(
        "as measured",
        found.num_physical_cores,
        found.memory.total,
        memory_gb_s=round(statistics.median(reads), 1),
        disk_gb_s=round(best, 2),
        used_bytes=found.memory.total - found.memory.available,
        disk_latency_ms=1e3 * max(0.0, expert_bytes / alone / 1e9 - expert_bytes / best / 1e9),
        core_gmac_s=statistics.median(products) / found.num_physical_cores,
    )


def whole_model(machine: Machine) -> Simulation:
    """GLM-5.2, all of it, on that machine.

    Raises:
        CapacityError: not even its dense weights can be streamed through the memory there is.
    """
    return simulate(machine, EngineOptions(), Workload())
