"""status: a model and the machine at a glance, without loading anything."""

from dataclasses import dataclass
from pathlib import Path

from glm_gpu import machine
from glm_gpu.checkpoint import FP8_SCALE_SUFFIX, Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.errors import GlmGpuError
from glm_gpu.kernels import cpu
from glm_gpu.opening import EngineOptions, plan_opening
from glm_gpu.recipe import tensor_class
from glm_gpu.stored import PADDING_PREFIX, SCALES_SUFFIX
from glm_gpu.tiers.live import StatusPublisher
from glm_gpu.tiers.plan import Plan
from glm_gpu.tiers.snapshot import snapshots


@dataclass(frozen=True)
class ModelStatus:
    """What a folder holds. `formats` tells for each class of weights how it is stored: int4_g64, BF16, ..."""

    config: ModelConfig
    fingerprint: str
    num_shards: int
    disk_bytes: int
    formats: dict[str, str]


@dataclass(frozen=True)
class MachineStatus:
    """What this machine gives: instruction set of the kernels, threads they use, memory and disk in bytes."""

    cpu: str
    instruction_set: str
    num_cores: int
    ram_bytes: int
    ram_available_bytes: int
    disk_free_bytes: int | None
    gpu: str


@dataclass(frozen=True)
class Status:
    """`problem` is why the model cannot be opened; None when the engine is ready. `model` is None when unreadable."""

    path: Path
    machine: MachineStatus
    model: ModelStatus | None
    plan: Plan | None
    problem: str | None


def status(path: Path | None, options: EngineOptions) -> Status:
    """The state of a model folder (None: the bundled demo) and of this machine."""
    path = path or DEMO_MODEL
    here = _machine(path)
    model = None
    try:
        with Checkpoint.open(path) as checkpoint:
            model = _model(checkpoint)
            plan = plan_opening(checkpoint, options).plan
    except GlmGpuError as error:
        return Status(path, here, model, None, str(error))
    return Status(path, here, model, plan, None)


def publisher(engine: Engine, folder: Path | None) -> StatusPublisher:
    """Tells other processes what an engine does, while it is open.

    Args:
        folder: the state folder, or None for nowhere.
    """
    facts = {"model": str(engine.checkpoint.path), "fingerprint": engine.checkpoint.fingerprint}
    return StatusPublisher(folder, snapshots(engine.store, facts))


def _model(checkpoint: Checkpoint) -> ModelStatus:
    config = checkpoint.config
    formats: dict[str, set[str]] = {}
    for name in checkpoint.names:
        if name.endswith((SCALES_SUFFIX, FP8_SCALE_SUFFIX)) or name.startswith(PADDING_PREFIX):
            continue
        stored = checkpoint.stored(name)
        found = stored.format.name if stored else checkpoint.info(name).dtype
        formats.setdefault(tensor_class(name, config), set()).add(found)
    return ModelStatus(
        config,
        checkpoint.fingerprint,
        len(checkpoint.shards),
        sum(shard.stat().st_size for shard in checkpoint.shards),
        {kind: "+".join(sorted(found)) for kind, found in sorted(formats.items())},
    )


def _machine(path: Path) -> MachineStatus:
    memory = machine.memory()
    return MachineStatus(
        machine.cpu_name(),
        cpu.implementation(),
        machine.num_physical_cores(),
        memory.total,
        memory.available,
        machine.disk_free_bytes(path) if path.is_dir() else None,
        machine.gpu_absence() or "an NVIDIA device is there; `glm-gpu doctor` shows it",
    )
