"""Machine facts, read from a made-up /proc and /sys."""

import os
import resource
from pathlib import Path

import pytest

from glm_gpu import machine

GIB = 1024**3
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


class FakeRoot:
    """A folder that stands for `/` and holds only what a test writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1048576 kB\nMemAvailable: 33554432 kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def group(self, path: str, **files: object) -> None:
        """group("sys/fs/cgroup/x", memory_max=…) writes memory.max there."""
        for name, value in files.items():
            self.write(f"{path}/{name.replace('_', '.', 1)}", f"{value}\n")


@pytest.fixture
def root(tmp_path) -> FakeRoot:
    return FakeRoot(tmp_path)


@pytest.fixture
def v2(root) -> FakeRoot:
    """A machine with unified control groups, this process in /user/session."""
    root.write("proc/self/mountinfo", V2_MOUNT + "\n")
    root.write("proc/self/cgroup", "0::/user/session\n")
    return root


def test_without_groups_memory_is_what_the_machine_has_available(root):
    found = machine.memory(root.path)
    assert (found.total, found.available, found.limit, found.bound_by) == (64 * GIB, 32 * GIB, None, "the machine")


def test_container_limit_binds_and_is_named(root):
    """C27."""
    root.write("proc/self/mountinfo", V2_MOUNT)
    root.write("proc/self/cgroup", "0::/\n")
    root.group("sys/fs/cgroup", memory_max=8 * GIB, memory_current=3 * GIB, memory_stat=f"anon {3 * GIB}")
    found = machine.memory(root.path)
    assert (found.total, found.available, found.limit) == (8 * GIB, 5 * GIB, 8 * GIB)
    assert found.bound_by == f"the control group {root.path}/sys/fs/cgroup"


def test_page_cache_counts_as_free_whether_hot_or_not_but_shared_memory_does_not(v2):
    stat = f"anon {GIB}\nfile {6 * GIB}\nshmem {GIB}\nactive_file {2 * GIB}\ninactive_file {3 * GIB}"
    v2.group("sys/fs/cgroup/user/session", memory_max=8 * GIB, memory_current=7 * GIB, memory_stat=stat)
    assert machine.memory(v2.path).available == 6 * GIB


def test_a_limit_above_what_the_machine_has_left_does_not_bind(v2):
    v2.group("sys/fs/cgroup/user/session", memory_max=60 * GIB, memory_current=GIB)
    found = machine.memory(v2.path)
    assert (found.available, found.limit, found.bound_by) == (32 * GIB, 60 * GIB, "the machine")


def test_the_tightest_of_all_outer_groups_binds(v2):
    v2.group("sys/fs/cgroup/user/session", memory_max="max", memory_current=GIB)
    v2.group("sys/fs/cgroup/user", memory_max=4 * GIB, memory_current=3 * GIB)
    v2.group("sys/fs/cgroup", memory_max=16 * GIB, memory_current=4 * GIB)
    found = machine.memory(v2.path)
    assert (found.available, found.limit) == (GIB, 4 * GIB)
    assert found.bound_by.endswith("/sys/fs/cgroup/user")


def test_an_outer_group_that_others_fill_binds_before_a_tighter_empty_one(v2):
    v2.group("sys/fs/cgroup/user/session", memory_max=4 * GIB, memory_current=0)
    v2.group("sys/fs/cgroup/user", memory_max=16 * GIB, memory_current=15 * GIB)
    found = machine.memory(v2.path)
    assert (found.available, found.limit) == (GIB, 4 * GIB)


def test_the_throttling_limit_counts(v2):
    v2.group("sys/fs/cgroup/user/session", memory_max="max", memory_high=2 * GIB, memory_current=GIB)
    assert machine.memory(v2.path).available == GIB


def test_a_limit_without_a_readable_usage_still_binds(v2):
    v2.group("sys/fs/cgroup/user/session", memory_max=2 * GIB)
    assert machine.memory(v2.path).available == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(v2):
    v2.group("sys/fs/cgroup/user/session", memory_max=GIB, memory_current=2 * GIB)
    assert machine.memory(v2.path).available == 0


def v1_mounts(inner_root: str = "/") -> str:
    lines = [
        f"31 23 0:{30 + n} {inner_root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
        for n, name in enumerate(["memory", "cpu,cpuacct", "cpuset"])
    ]
    return "\n".join(lines)


def test_version_1_groups_are_read_and_their_no_limit_is_no_limit(root):
    root.write("proc/self/mountinfo", v1_mounts())
    root.write("proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n2:cpuset:/\n")
    root.group("sys/fs/cgroup/memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=GIB)
    assert machine.memory(root.path).limit is None
    stat = f"total_active_file {GIB}\ntotal_inactive_file {GIB}"
    root.group(
        "sys/fs/cgroup/memory/box", memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=3 * GIB, memory_stat=stat
    )
    found = machine.memory(root.path)
    assert (found.limit, found.available) == (4 * GIB, 3 * GIB)


def test_version_1_tells_of_limits_above_what_is_mounted(root):
    root.write("proc/self/mountinfo", v1_mounts("/docker/abc"))
    root.write("proc/self/cgroup", "4:memory:/docker/abc/inner\n")
    stat = f"hierarchical_memory_limit {2 * GIB}"
    root.group(
        "sys/fs/cgroup/memory/inner", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=GIB, memory_stat=stat
    )
    assert machine.memory(root.path).available == GIB


def test_a_container_that_sees_its_group_by_the_hosts_name_finds_its_limit(root):
    root.write("proc/self/mountinfo", v1_mounts("/docker/other-name"))
    root.write("proc/self/cgroup", "4:memory:/docker/abc\n")
    root.group("sys/fs/cgroup/memory", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)
    assert machine.memory(root.path).available == GIB


def test_hybrid_groups_are_found_where_they_are_mounted(root):
    unified = "40 31 0:40 / /sys/fs/cgroup/unified\\040two rw - cgroup2 cgroup2 rw"
    root.write("proc/self/mountinfo", v1_mounts() + "\n" + unified)
    root.write("proc/self/cgroup", "4:memory:/\n0::/a\n")
    root.group("sys/fs/cgroup/unified two/a", memory_max=3 * GIB, memory_current=GIB)
    assert machine.memory(root.path).available == 2 * GIB


def test_the_lock_limit_is_read(root):
    header = "Limit                     Soft Limit           Hard Limit           Units\n"
    root.write(
        "proc/self/limits", header + "Max locked memory         8388608              unlimited            bytes\n"
    )
    assert machine.memory(root.path).memlock_limit == 8388608
    root.write(
        "proc/self/limits", header + "Max locked memory         unlimited            unlimited            bytes\n"
    )
    assert machine.memory(root.path).memlock_limit is None


def test_without_proc_the_c_library_answers(tmp_path):
    found = machine.read_machine(tmp_path)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (found.memory.total, found.memory.limit, found.cpu_quota) == (physical, None, None)
    assert 0 < found.memory.available <= physical
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found.memory.memlock_limit == (None if soft == resource.RLIM_INFINITY else soft)
    assert found.cpu_name
    assert found.num_logical_cores == found.num_physical_cores >= 1
    assert machine.peak_rss_bytes(tmp_path) > 1024**2
    assert machine.anon_rss_bytes(tmp_path) is None
    assert machine.filesystem(tmp_path, tmp_path) is None


def test_hyperthreads_of_one_core_count_once(root, monkeypatch):
    """C33."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        root.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings + "\n")
    assert machine.num_physical_cores(root.path) == 2
    found = machine.read_machine(root.path)
    assert (found.num_logical_cores, found.num_physical_cores, found.has_smt) == (4, 2, True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2}, raising=False)
    assert not machine.read_machine(root.path).has_smt


def test_cpu_quota_caps_the_cores_and_leaves_at_least_one(v2, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for quota, cores in {"350000 100000": 3, "50000 100000": 1, "max 100000": 8, "1600000 100000": 8}.items():
        v2.group("sys/fs/cgroup/user", cpu_max=quota)
        assert machine.num_physical_cores(v2.path) == cores, quota
    v2.group("sys/fs/cgroup/user/session", cpu_max="250000 100000")
    assert machine.read_machine(v2.path).cpu_quota == 2.5


def test_version_1_quota_counts_and_minus_one_is_none(root, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    root.write("proc/self/mountinfo", v1_mounts())
    root.write("proc/self/cgroup", "3:cpu,cpuacct:/box\n")
    root.group("sys/fs/cgroup/cpu,cpuacct/box", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    assert machine.num_physical_cores(root.path) == 8
    root.group("sys/fs/cgroup/cpu,cpuacct/box", cpu_cfs_quota_us=200000)
    assert machine.num_physical_cores(root.path) == 2


def test_the_processor_is_named(root):
    root.write(
        "proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2.1GHz\n\nprocessor\t: 1\nmodel name\t: Other\n"
    )
    assert machine.cpu_name(root.path) == "Some CPU @ 2.1GHz"
    root.write("proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd0c\n")
    assert machine.cpu_name(root.path)


def test_the_file_system_of_a_path_is_the_innermost_topmost_mount(root, tmp_path):
    folder = tmp_path / "data disk"
    folder.mkdir()
    escaped = str(folder.resolve()).replace(" ", "\\040")
    root.write(
        "proc/self/mountinfo",
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"21 20 8:2 / {escaped} rw - xfs /dev/sdb1 rw\n"
        f"22 20 0:9 / {escaped} rw shared:1 - tmpfs tmpfs rw\n"
        f"23 20 8:3 / {escaped}2 rw - btrfs /dev/sdc1 rw\n",
    )
    assert machine.filesystem(folder / "not yet" / "there", root.path) == "tmpfs"
    assert machine.filesystem(tmp_path, root.path) == "ext4"


def test_memory_of_this_process_is_read(root):
    root.write("proc/self/status", "Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t 1024 kB\nRssAnon:\t  512 kB\n")
    assert (machine.peak_rss_bytes(root.path), machine.anon_rss_bytes(root.path)) == (2048 * 1024, 512 * 1024)


def test_damaged_files_are_read_as_absent(root):
    root.write("proc/meminfo", "MemTotal: lots\n:\n\n")
    root.write("proc/self/mountinfo", "garbage\n1 2 3 - \n")
    root.write("proc/self/status", "VmHWM\n")
    found = machine.read_machine(root.path)
    assert found.memory.total > 0 and machine.peak_rss_bytes(root.path) > 0


def test_a_missing_gpu_is_explained(root):
    assert "driver" in machine.gpu_absence(root.path)
    root.write("proc/driver/nvidia/version", "NVRM")
    assert "lists no device" in machine.gpu_absence(root.path)
    root.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: x")
    assert "--gpus all" in machine.gpu_absence(root.path)
    root.write("dev/nvidia0", "")
    assert machine.gpu_absence(root.path) is None


def test_this_machine_answers_too(tmp_path):
    found = machine.read_machine()
    assert 0 < found.memory.available <= found.memory.total
    assert 1 <= machine.num_physical_cores() <= found.num_physical_cores <= found.num_logical_cores
    assert machine.peak_rss_bytes() > 1024**2
    assert machine.disk_free_bytes(tmp_path) > 0


def test_stolen_time_is_the_eighth_count_of_all_processors(root):
    assert machine.stolen_s(root.path) == 0.0  # no /proc/stat
    root.write("proc/stat", "cpu  10 20 30 400 5 6 7 250 9 0\ncpu0 5 10 15 200 2 3 3 125 4 0\nintr 1 2\n")
    assert machine.stolen_s(root.path) == 250 / os.sysconf("SC_CLK_TCK")
    root.write("proc/stat", "cpu  10 20 30 400\n")  # kernels before 2.6.11
    assert machine.stolen_s(root.path) == 0.0
