"""Rows of a bench: a median with its spread, the limit measured beside it, and how far repeats of it differ."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from glm_gpu import __version__
from glm_gpu.config import ModelConfig
from glm_gpu.kernels import cpu
from glm_gpu.machine import peak_rss_bytes, read_machine, storage_bytes_read


@dataclass(frozen=True)
class Limit:
    """What the machine can do at best, in the unit of the row that is held against it."""

    value: float
    name: str


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        samples: the same thing measured again and again, at least once.
        unit: what they are, as in "tok/s"; for "ms" less is better.
        limit: None where nothing bounds it that could be measured.
        more: further facts of the row, for its JSON.
    """

    name: str
    samples: tuple[float, ...]
    unit: str
    limit: Limit | None = None
    more: dict = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def noise(self) -> float | None:
        """How far the samples lie apart, as a share of their median; None of a single one."""
        if len(self.samples) < 2 or not self.median:
            return None
        return (max(self.samples) - min(self.samples)) / self.median

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return self.median / self.limit.value if self.limit and self.limit.value else None

    def document(self) -> dict:
        """The row for JSON."""
        limit = {"limit": self.limit.value, "limit_name": self.limit.name} if self.limit else {}
        spread = {"median": self.median, "low": min(self.samples), "high": max(self.samples)}
        found = {"name": self.name, "unit": self.unit, **spread, "samples": len(self.samples), **limit}
        return found | ({} if self.share is None else {"share": self.share}) | self.more


class Part:
    """One bench as it goes: its rows, and what the process took for them.

    Args:
        name: as the command spells it.
        subject: what was measured, for people.

    Time and bytes read count from here on.
    """

    def __init__(self, name: str, subject: str) -> None:
        self.name, self.subject = name, subject
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._began, self._bytes_before = time.perf_counter(), storage_bytes_read()

    def add(self, name: str, samples: Iterable[float], unit: str, limit: Limit | None = None, **more: object) -> Row:
        """Take in a row."""
        self.rows.append(Row(name, tuple(samples), unit, limit, more))
        return self.rows[-1]

    @property
    def noise(self) -> float | None:
        """The noise floor: how far identical measurements differ in the median row; None where none was repeated."""
        found = [row.noise for row in self.rows if row.noise is not None]
        return statistics.median(found) if found else None

    def document(self) -> dict:
        """Everything for JSON; `storage_bytes_read` is what the disk delivered, page cache apart, or None."""
        before, now = self._bytes_before, storage_bytes_read()
        return {
            "bench": self.name,
            "subject": self.subject,
            "machine": stamp(),
            "rows": [row.document() for row in self.rows],
            "noise": self.noise,
            "storage_bytes_read": None if before is None or now is None else now - before,
            "peak_rss_bytes": peak_rss_bytes(),
            "seconds": time.perf_counter() - self._began,
            "notes": self.notes,
        }


def stamp() -> dict:
    """What a figure depends on besides the code that is measured."""
    machine = read_machine()
    return {
        "version": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": sys.version.split()[0],
        "cpu": machine.cpu_name,
        "cores": machine.num_physical_cores,
        "memory_bytes": machine.memory.total,
        "kernels": cpu.implementation(),
        "threads": cpu.get_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def model_part(name: str, path: Path) -> Part:
    """A part about a model.

    Raises:
        CheckpointError, UnsupportedModelError: the folder holds none.
    """
    config = ModelConfig.open(path)
    return Part(name, f"{path.name}: {config.num_hidden_layers} layers, {config.n_routed_experts} experts each")
