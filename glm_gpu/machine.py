"""What this machine has: cores, memory under every limit that binds this process, and the disk under a folder."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class Memory:
    """Memory as this process may use it, in bytes.

    `available` is the least of what the machine has left and what each control group above the process leaves; page
    cache counts as free in both. `limit` is the tightest control group limit, or None.
    """

    total: int
    available: int
    limit: int | None
    memlock_limit: int | None


def cpu_name() -> str:
    """The processor's name as the system gives it, or the architecture when it gives none."""
    for line in _read(_ROOT / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def num_physical_cores() -> int:
    """Physical cores this process may run on: affinity mask and CPU quota counted, hyperthreads not."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = range(os.cpu_count() or 1)
    topology = _ROOT / "sys/devices/system/cpu"
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu) for cpu in cpus}
    quota = _cpu_quota()
    return max(1, min(len(cores), quota) if quota else len(cores))


def memory() -> Memory:
    """Total and available memory, the control group's limit, and how much may be locked."""
    total, available = _system_memory()
    limit = None
    for group_limit, used in _memory_groups():
        limit = group_limit if limit is None else min(limit, group_limit)
        available = min(available, max(0, group_limit - used))
    return Memory(min(total, limit or total), available, limit, _memlock_limit())


def disk_free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write on the disk under a folder."""
    return shutil.disk_usage(folder).free


def peak_rss_bytes() -> int:
    """The most memory this process has held resident so far."""
    for line in _read(_ROOT / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gpu_absence() -> str | None:
    """Why no NVIDIA device can be used here, or None when the driver lists one."""
    if not (_ROOT / "proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    devices = _ROOT / "proc/driver/nvidia/gpus"
    if not devices.is_dir() or not any(devices.iterdir()):
        return "the NVIDIA driver is loaded, but lists no device"
    if not any((_ROOT / "dev").glob("nvidia[0-9]*")):
        return "the NVIDIA driver lists a device, but /dev/nvidia* is missing; a container needs `--gpus all`"
    return None


def _system_memory() -> tuple[int, int]:
    fields = {}
    for line in _read(_ROOT / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2  # without /proc nobody says what is free; half is what a desktop usually leaves


def _control_groups() -> list[tuple[str, Path]]:
    """(controllers, folder) of each control group this process is in, innermost first, and of all above them."""
    groups = []
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = _ROOT / "sys/fs/cgroup"
        if controllers:
            mount /= controllers.removeprefix("name=")
        inner = mount / path.strip("/")
        groups += [(controllers, folder) for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return groups


def _memory_groups() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each group that limits memory."""
    found = []
    for controllers, folder in _control_groups():
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
        # version 1 writes "no limit" as a number near 2**63
        if not limit.isdigit() or not used.isdigit() or int(limit) >= 2**60:
            continue
        droppable = 0
        for line in _read(folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == names[2]:
                droppable = int(value)
        found.append((int(limit), int(used) - droppable))
    return found


def _cpu_quota() -> int | None:
    """Whole CPUs that the tightest control group quota allows, at least 1, or None without a quota."""
    quotas = []
    for controllers, folder in _control_groups():
        if controllers == "":
            fields = _read(folder / "cpu.max").split()
        elif "cpu" in controllers.split(","):
            fields = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        else:
            continue
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
            quotas.append(max(1, int(fields[0]) // int(fields[1])))
    return min(quotas, default=None)


def _memlock_limit() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
