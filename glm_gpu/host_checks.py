"""What a machine needs to serve a large model: disk, driver, limits. `doctor` and deploy/provision.sh share these."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm_gpu import machine
from glm_gpu.units import format_bytes

State = Literal["ok", "warn", "fail"]

# GLM-5.2 as `convert` writes it by default: 419 GB, and 10 GB of the multi-token layer at eight bits.
GLM_CONTAINER_BYTES = 430_000_000_000
# What CuPy's and Triton's CUDA 12 builds need.
MIN_DRIVER = 525
# Shards in both ways of reading, and a server's connections.
MIN_OPEN_FILES = 4096
# Less than this can be locked: no more than an expert or two of GLM-5.2.
LITTLE_MEMLOCK = 1 << 30
# File systems whose files are in memory, or come over a network.
_MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
_NETWORK_KINDS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph"})


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was found, and what to do when that is not good."""

    name: str
    state: State
    found: str
    advice: str = ""


def check_limits(root: Path = Path("/")) -> Iterator[Check]:
    """Limits of this process and settings of the kernel that cost speed when they are tight."""
    yield _memlock(machine.memory(root).memlock_limit)
    yield _open_files(machine.open_files_limit())
    yield _huge_pages(machine.huge_pages(root))


def check_driver(root: Path = Path("/")) -> Check:
    """Whether an NVIDIA device can be used; having none is fine."""
    if absence := machine.gpu_absence(root):
        return Check("gpu", "ok", absence)
    version = machine.nvidia_driver(root)
    major = version and version.split(".")[0]
    if not major or not major.isdigit():
        return Check("gpu", "ok", "an NVIDIA device is there, its driver does not tell its version")
    if int(major) < MIN_DRIVER:
        return Check(
            "gpu", "warn", f"an NVIDIA device is there, with driver {version}, expected {MIN_DRIVER} or newer",
            f"install a newer driver (apt install nvidia-driver-{MIN_DRIVER}-server or later) and restart",
        )  # fmt: skip
    return Check("gpu", "ok", f"an NVIDIA device is there, with driver {version}")


def check_disk(folder: Path, need_bytes: int = GLM_CONTAINER_BYTES, root: Path = Path("/")) -> Check:
    """Whether a folder is the place for a model: room, a disk of this machine, reads past the page cache."""
    if not folder.is_dir():
        return Check("disk", "fail", f"{folder} is no folder", f"mkdir -p {folder}, on the fastest disk there is")
    kind, free = machine.filesystem(folder, root) or "an unknown file system", machine.disk_free_bytes(folder)
    found = f"{folder}: {format_bytes(free)} free on {kind}"
    if free < need_bytes:
        need = format_bytes(need_bytes)
        return Check("disk", "fail", f"{found}, expected {need} for GLM-5.2 at four bits", "name a larger disk")
    if kind in _MEMORY_KINDS:
        return Check("disk", "warn", f"{found}, which is memory", "name a folder on a disk")
    if kind in _NETWORK_KINDS:
        return Check("disk", "warn", f"{found}, over a network", "copy the model to a disk of this machine")
    if not _takes_direct_reads(folder):
        advice = "experts are then read through the page cache, which is slower; ext4 and xfs take direct reads"
        return Check("disk", "warn", f"{found}, which refuses reads past the page cache", advice)
    return Check("disk", "ok", f"{found}, reads past the page cache work")


def _memlock(limit: int | None) -> Check:
    if limit is None:
        return Check("memlock", "ok", "any amount may be locked")
    found = f"{format_bytes(limit)} may be locked"
    if limit >= LITTLE_MEMLOCK:
        return Check("memlock", "ok", found)
    advice = "hot experts may be swapped out; LimitMEMLOCK=infinity in a unit, `* - memlock unlimited` in limits.conf"
    return Check("memlock", "warn", found, advice)


def _open_files(limit: int) -> Check:
    if limit >= MIN_OPEN_FILES:
        return Check("open files", "ok", f"{limit} may be open at once")
    advice = f"a server with many clients runs out; LimitNOFILE=65536 in a unit, or ulimit -n {MIN_OPEN_FILES}"
    return Check("open files", "warn", f"{limit} may be open at once, expected {MIN_OPEN_FILES}", advice)


def _huge_pages(mode: str | None) -> Check:
    if mode is None:
        return Check("huge pages", "ok", "this system does not tell")
    if mode != "never":
        return Check("huge pages", "ok", f"transparent huge pages: {mode}")
    advice = (
        "experts lie on small pages, which costs bandwidth; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    return Check("huge pages", "warn", "transparent huge pages: never", advice)


def _takes_direct_reads(folder: Path) -> bool:
    """Whether a file there opens for direct reads; made for the question and removed."""
    import tempfile

    if not hasattr(os, "O_DIRECT") or sys.platform == "darwin":
        return True  # there is no such flag, or no need of it
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except PermissionError:
        return True  # not ours to write: reading is what will count
    except OSError:
        return False
    return True
