"""What this machine has: cores, memory under every limit that binds this process, and the disk under a folder.

Nothing here is cached or changed. `root` stands for `/`, so that tests can bring a /proc and /sys of their own; where
there is none (macOS), the facts come from the C library, or are left out.
"""

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# Version 1 control groups write "no limit" as a number near 2**63.
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class Memory:
    """Memory as this process may use it, in bytes.

    `available` is the least of what the machine has left and what each control group above the process leaves; page
    cache counts as free in both. `bound_by` says which of them it is. `limit` is the tightest control group limit, or
    None; `memlock_limit` is how much may be locked, None for all.
    """

    total: int
    available: int
    limit: int | None
    memlock_limit: int | None
    bound_by: str


@dataclass(frozen=True)
class MachineReport:
    """The machine as this process sees it.

    `num_logical_cores` and `num_physical_cores` are those in the affinity mask; `cpu_quota` is how many CPUs' time the
    control groups grant, or None.
    """

    cpu_name: str
    num_logical_cores: int
    num_physical_cores: int
    cpu_quota: float | None
    memory: Memory

    @property
    def has_smt(self) -> bool:
        """Whether some of the logical cores share a physical one."""
        return self.num_logical_cores > self.num_physical_cores


@dataclass(frozen=True)
class _Group:
    """One control group: its folder, and whether it is of version 2."""

    folder: Path
    is_v2: bool


def read_machine(root: Path = _ROOT) -> MachineReport:
    """Everything about processor and memory at once."""
    cores = _logical_cores()
    return MachineReport(cpu_name(root), len(cores), _count_physical(cores, root), _cpu_quota(root), memory(root))


def cpu_name(root: Path = _ROOT) -> str:
    """The processor's name as the system gives it, or the architecture when it gives none."""
    return _fields(root / "proc/cpuinfo").get("model name") or platform.processor() or platform.machine()


def num_physical_cores(root: Path = _ROOT) -> int:
    """Physical cores this process may keep busy: affinity mask and CPU quota counted, hyperthreads not."""
    count = _count_physical(_logical_cores(), root)
    quota = _cpu_quota(root)
    return count if quota is None else max(1, min(count, int(quota)))


def memory(root: Path = _ROOT) -> Memory:
    """Total and available memory, the control group's limit, and how much may be locked."""
    total, available = _system_memory(root)
    limit, bound_by = None, "the machine"
    for group_limit, used, name in _memory_groups(root):
        limit = group_limit if limit is None else min(limit, group_limit)
        left = max(0, group_limit - used)
        if left < available:
            available, bound_by = left, name
    return Memory(min(total, limit or total), available, limit, _memlock_limit(root), bound_by)


def disk_free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write on the disk under a folder."""
    return shutil.disk_usage(folder).free


def filesystem(path: Path, root: Path = _ROOT) -> str | None:
    """The type of the file system that holds a path ("ext4", "tmpfs", "nfs4"), or None where /proc does not say."""
    path = path.resolve()
    found = None
    for mount in _mounts(root):
        # the innermost mount point holds the path; of two on one point the later one lies on top
        if path.is_relative_to(mount.point) and (found is None or mount.point.is_relative_to(found.point)):
            found = mount
    return found.kind if found else None


def peak_rss_bytes(root: Path = _ROOT) -> int:
    """The most memory this process has held resident so far."""
    if size := _status_bytes(root, "VmHWM"):
        return size
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anon_rss_bytes(root: Path = _ROOT) -> int | None:
    """Memory this process holds resident now, files mapped into it not counted; None where /proc does not say."""
    return _status_bytes(root, "RssAnon")


def storage_bytes_read(pid: int | None = None, root: Path = _ROOT) -> int | None:
    """Bytes that the disk has delivered for a process so far, page cache apart; None where /proc does not say.

    Args:
        pid: None for this process.
    """
    size = _fields(root / f"proc/{'self' if pid is None else pid}/io").get("read_bytes")
    return int(size) if size else None


def stolen_s(root: Path = _ROOT) -> float:
    """Seconds, added over the processors, for which a hypervisor kept them to itself; 0 where /proc does not say."""
    fields = _read(root / "proc/stat").partition("\n")[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 and fields[0] == "cpu" else 0.0


def process_start(pid: int, root: Path = _ROOT) -> str | None:
    """What tells a running process from a later one of the same number; None when it does not run."""
    if not (root / "proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # it runs for another user
            pass
        return "running"
    fields = _read(root / f"proc/{pid}/stat").rpartition(")")[2].split()  # the name before may hold anything
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else None


def gpu_absence(root: Path = _ROOT) -> str | None:
    """Why no NVIDIA device can be used here, or None when the driver lists one."""
    if not (root / "proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    devices = root / "proc/driver/nvidia/gpus"
    if not devices.is_dir() or not any(devices.iterdir()):
        return "the NVIDIA driver is loaded, but lists no device"
    if not any((root / "dev").glob("nvidia[0-9]*")):
        return "the NVIDIA driver lists a device, but /dev/nvidia* is missing; a container needs `--gpus all`"
    return None


def nvidia_driver(root: Path = _ROOT) -> str | None:
    """The version of the NVIDIA driver, as in "570.86.15"; None where none is loaded."""
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", _read(root / "proc/driver/nvidia/version"))
    return found[1] if found else None


def huge_pages(root: Path = _ROOT) -> str | None:
    """When the system gives transparent huge pages: "always", "madvise" or "never"; None where it does not tell."""
    found = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None


def open_files_limit() -> int:
    """Files that this process may have open at once."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _logical_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _count_physical(cpus: set[int], root: Path) -> int:
    topology = root / "sys/devices/system/cpu"
    return len({_read(topology / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu) for cpu in cpus})


def _system_memory(root: Path) -> tuple[int, int]:
    sizes = {key: _kib(value) for key, value in _fields(root / "proc/meminfo").items()}
    if total := sizes.get("MemTotal"):
        return total, sizes.get("MemAvailable", sizes.get("MemFree", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2  # without /proc nobody says what is free; half is what a desktop usually leaves


def _memory_groups(root: Path) -> list[tuple[int, int, str]]:
    """(limit, bytes in use that cannot be dropped, name) of each group that limits memory, innermost first."""
    found = []
    for group in _control_groups(root, "memory"):
        stat = dict(line.partition(" ")[::2] for line in _read(group.folder / "memory.stat").splitlines())
        if group.is_v2:
            # memory.high does not kill, but above it every allocation waits for pages to be reclaimed
            limits = [_number(group.folder / name) for name in ("memory.max", "memory.high")]
            used = _number(group.folder / "memory.current")
            droppable = ("active_file", "inactive_file", "slab_reclaimable")
        else:
            limits = [
                _number(group.folder / "memory.limit_in_bytes"),
                int(stat.get("hierarchical_memory_limit", 2**63)),
            ]
            used = _number(group.folder / "memory.usage_in_bytes")
            droppable = ("total_active_file", "total_inactive_file")
        limit = min((size for size in limits if size is not None), default=_NO_LIMIT)
        if limit < _NO_LIMIT:
            kept = max(0, (used or 0) - sum(int(stat.get(key, 0)) for key in droppable))
            found.append((limit, kept, f"the control group {group.folder}"))
    return found


def _cpu_quota(root: Path) -> float | None:
    """How many CPUs' time the tightest control group grants, or None without a quota."""
    quotas = []
    for group in _control_groups(root, "cpu"):
        if group.is_v2:
            fields = _read(group.folder / "cpu.max").split()
        else:
            fields = [_read(group.folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def _control_groups(root: Path, controller: str) -> list[_Group]:
    """The groups that may limit this process, innermost first, up to where each hierarchy is mounted."""
    mounts = [mount for mount in _mounts(root) if mount.kind in ("cgroup", "cgroup2")]
    groups = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # id:controllers:path
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.kind != ("cgroup2" if is_v2 else "cgroup"):
                continue
            if not is_v2 and controller not in mount.options.split(","):
                continue
            top = root / mount.point.relative_to("/")
            # In a container the path may be seen from outside; what is mounted then is the group itself.
            inside = Path(path).is_relative_to(mount.inner_root)
            folder = top / Path(path).relative_to(mount.inner_root) if inside else top
            groups += [_Group(f, is_v2) for f in (folder, *folder.parents) if f.is_relative_to(top)]
    return groups


@dataclass(frozen=True)
class _Mount:
    """A line of /proc/self/mountinfo: `inner_root` of the file system is what shows at `point`."""

    inner_root: Path
    point: Path
    kind: str
    options: str


def _mounts(root: Path) -> list[_Mount]:
    found = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) >= 6 and len(tail) >= 3:
            found.append(_Mount(Path(_unescape(fields[3])), Path(_unescape(fields[4])), tail[0], tail[2]))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _memlock_limit(root: Path) -> int | None:
    match = re.search(r"^Max locked memory\s+(\S+)", _read(root / "proc/self/limits"), re.MULTILINE)
    if match:
        return None if match.group(1) == "unlimited" else int(match.group(1))
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _status_bytes(root: Path, key: str) -> int | None:
    value = _fields(root / "proc/self/status").get(key)
    return None if value is None else _kib(value)


def _fields(path: Path) -> dict[str, str]:
    """The lines `key : value` of a file, the first of equal keys."""
    found: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _kib(value: str) -> int:
    number = value.split(" ")[0]
    return int(number) * 1024 if number.isdigit() else 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
