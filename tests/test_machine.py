"""Machine facts, read from a made-up /proc and /sys."""

import os

import pytest

from glm_gpu import machine

GIB = 1024**3


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A file system root that holds only what a test writes into it."""
    monkeypatch.setattr(machine, "_ROOT", tmp_path)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1048576 kB\nMemAvailable: 33554432 kB\n")
    return write


def test_without_groups_memory_is_what_the_machine_has_available(root):
    found = machine.memory()
    assert (found.total, found.available, found.limit) == (64 * GIB, 32 * GIB, None)


def test_container_limit_binds_and_page_cache_counts_as_free(root):
    root("proc/self/cgroup", "0::/\n")
    root("sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    root("sys/fs/cgroup/memory.current", f"{7 * GIB}\n")
    root("sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {6 * GIB}\n")
    found = machine.memory()
    assert (found.total, found.available, found.limit) == (8 * GIB, 7 * GIB, 8 * GIB)


def test_a_limit_on_an_outer_group_binds_too(root):
    root("proc/self/cgroup", "0::/user/session\n")
    root("sys/fs/cgroup/user/memory.max", f"{4 * GIB}")
    root("sys/fs/cgroup/user/memory.current", f"{GIB}")
    root("sys/fs/cgroup/user/session/memory.max", "max")
    root("sys/fs/cgroup/user/session/memory.current", f"{GIB}")
    assert machine.memory().available == 3 * GIB


def test_version_1_groups_are_read_and_their_no_limit_is_no_limit(root):
    root("proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n")
    root("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    root("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}")
    assert machine.memory().limit is None
    root("sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}")
    root("sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{GIB}")
    assert machine.memory().limit == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(root):
    root("proc/self/cgroup", "0::/\n")
    root("sys/fs/cgroup/memory.max", f"{GIB}")
    root("sys/fs/cgroup/memory.current", f"{2 * GIB}")
    assert machine.memory().available == 0


def test_hyperthreads_of_one_core_count_once(root, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        root(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings + "\n")
    assert machine.num_physical_cores() == 2


def test_cpu_quota_caps_the_cores_and_leaves_at_least_one(root, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    root("proc/self/cgroup", "0::/\n")
    root("sys/fs/cgroup/cpu.max", "350000 100000\n")
    assert machine.num_physical_cores() == 3
    root("sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert machine.num_physical_cores() == 1
    root("sys/fs/cgroup/cpu.max", "max 100000\n")
    assert machine.num_physical_cores() == 8


def test_a_missing_gpu_is_explained(root, tmp_path):
    assert "driver" in machine.gpu_absence()
    root("proc/driver/nvidia/version", "NVRM")
    assert "lists no device" in machine.gpu_absence()
    root("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: x")
    assert "--gpus all" in machine.gpu_absence()
    root("dev/nvidia0", "")
    assert machine.gpu_absence() is None


def test_this_process_has_resident_memory_and_a_disk(tmp_path):
    assert machine.peak_rss_bytes() > 1024**2
    assert machine.disk_free_bytes(tmp_path) > 0
    assert machine.cpu_name()
