"""What may be used: memory of the host under all its limits, and of each device."""

from dataclasses import dataclass

from glm_gpu.machine import Memory
from glm_gpu.units import format_bytes

# Without --ram so much of what is available is left to others: a tenth, but no more than this.
MAX_RESERVE = 1 << 30
# A device's own share: driver context, kernels, and what its allocator cannot use.
DEVICE_RESERVE = 512 << 20


@dataclass(frozen=True)
class DeviceBudget:
    """One device's memory: all of it, and what others already use."""

    name: str
    total_bytes: int
    used_bytes: int
    reserve_bytes: int = DEVICE_RESERVE

    @property
    def free_bytes(self) -> int:
        """What may be filled."""
        return max(0, self.total_bytes - self.used_bytes - self.reserve_bytes)


@dataclass(frozen=True)
class Budget:
    """What a plan may use.

    Attributes:
        ram_bytes: memory that this process may hold, what it holds already included.
        reason: what sets that bound.
        base_bytes: what it holds already.
        spare_bytes: memory left beside the budget, which the system may use as page cache.
        memlock_bytes: how much may be locked, None for any amount.
        devices: in the order in which a pass visits them.
    """

    ram_bytes: int
    reason: str
    base_bytes: int = 0
    spare_bytes: int = 0
    memlock_bytes: int | None = None
    devices: tuple[DeviceBudget, ...] = ()


def host_budget(
    memory: Memory, base_bytes: int, asked_bytes: int | None, devices: tuple[DeviceBudget, ...] = ()
) -> Budget:
    """The budget on this machine.

    Args:
        memory: as the machine and its control groups have it; what is available comes on top of `base_bytes`.
        base_bytes: anonymous memory that this process holds now.
        asked_bytes: --ram, obeyed as far as the limits allow; None for what is available, less a reserve.
    """
    most = memory.available + base_bytes
    if asked_bytes is None:
        ram_bytes = most - min(MAX_RESERVE, memory.available // 10)
        reason = f"what {memory.bound_by} has available, less a reserve of {format_bytes(most - ram_bytes)}"
    elif asked_bytes <= most:
        ram_bytes, reason = asked_bytes, "--ram"
    else:
        ram_bytes, reason = most, f"{memory.bound_by} leaves less than --ram {format_bytes(asked_bytes)}"
    return Budget(ram_bytes, reason, base_bytes, most - ram_bytes, memory.memlock_limit, devices)
