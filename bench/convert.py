"""Measure a conversion: GB/s of reading, quantizing and writing, beside what the disk does alone; peak memory.

    python bench/make_checkpoint.py /tmp/slice
    python bench/convert.py /tmp/slice /tmp/out [--threads N] [--rounding search]

The disk alone: one sequential pass over the first source shard, its pages dropped before, and one file as large as a
source shard written and flushed. The output folder must not exist and is removed. Kept in
bench/results/convert_search.json, or convert_rtn.json.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import record

from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.kernels import cpu
from glm_gpu.machine import cpu_name, num_physical_cores, peak_rss_bytes
from glm_gpu.report_convert import stage_rates

_CHUNK_BYTES = 16 << 20


def disk_read_gb_s(path: Path) -> float:
    """GB/s of reading a file from the disk, in order, 16 MiB at a time."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.readinto(buffer):
            pass
        return path.stat().st_size / (time.perf_counter() - began) / 1e9


def disk_write_gb_s(folder: Path, num_bytes: int) -> float:
    """GB/s of writing and flushing a file of random bytes."""
    chunk = os.urandom(_CHUNK_BYTES)
    path = folder / "disk_write"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(0, num_bytes, _CHUNK_BYTES):
            file.write(chunk)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return num_bytes / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=num_physical_cores())
    parser.add_argument("--rounding", choices=("rtn", "search"), default=ConvertSettings().rounding)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    shard = next(iter(sorted(arguments.source.glob("*.safetensors"))))
    alone = {"disk_read_gb_s": disk_read_gb_s(shard), "disk_write_gb_s": disk_write_gb_s(arguments.out, 1 << 30)}
    with LocalSource(arguments.source) as source:
        for name in source.shard_names:
            with (arguments.source / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        report = convert(source, arguments.out, ConvertSettings(rounding=arguments.rounding), threads=arguments.threads)
        seconds = time.perf_counter() - began
    shutil.rmtree(arguments.out)
    rates, times = stage_rates(report.times, seconds), report.times
    print(f"{cpu_name()}, {cpu.implementation()}, {arguments.threads} threads, rounding {arguments.rounding}")
    print(f"disk alone: read {alone['disk_read_gb_s']:.2f} GB/s, write {alone['disk_write_gb_s']:.2f} GB/s")
    print(f"read      {times.read_bytes / 1e9:6.2f} GB  {rates['read_gb_s']:.2f} GB/s a thread")
    print(f"quantize  {times.quantize_weights / 1e9:6.2f} G weights  {rates['quantize_gb_s']:.2f} GB/s a core")
    print(f"write     {times.write_bytes / 1e9:6.2f} GB  {rates['write_gb_s']:.2f} GB/s, hash and flush included")
    print(f"whole     {seconds:6.1f} s  {rates['source_gb_s']:.2f} GB/s of source, writer waited {times.wait_s:.1f} s")
    print(f"peak RSS  {peak_rss_bytes() / 1e9:6.2f} GB")
    sizes = {"source_bytes": times.read_bytes, "written_bytes": times.write_bytes, "peak_rss_bytes": peak_rss_bytes()}
    found = {
        "threads": arguments.threads,
        "rounding": arguments.rounding,
        **alone,
        **rates,
        "seconds": seconds,
        **sizes,
    }
    print(record.save(f"convert_{arguments.rounding}", found))


if __name__ == "__main__":
    main()
