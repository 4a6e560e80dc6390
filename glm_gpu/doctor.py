"""doctor: everything a run needs, checked before a byte of the weights is read."""

import importlib
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from glm_gpu import machine
from glm_gpu.chat import ChatTemplate
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.device_choice import open_devices
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.errors import GlmGpuError
from glm_gpu.host_checks import Check, check_disk, check_driver, check_limits
from glm_gpu.json_file import missing_file
from glm_gpu.kernels import cpu
from glm_gpu.opening import EngineOptions, plan_opening
from glm_gpu.tokenizer import Tokenizer
from glm_gpu.units import format_bytes


def check_all(path: Path | None, options: EngineOptions, disk: Path | None = None) -> list[Check]:
    """The machine and the model, checked in this order; a check that rests on a failed one is left out.

    Args:
        path: a model folder, or None for the bundled demo.
        disk: a folder that GLM-5.2 is to be stored in; None to leave that out.
    """
    room = [] if disk is None else [check_disk(disk)]
    return [*check_machine(options), *room, *check_model(path or DEMO_MODEL, options)]


def check_machine(options: EngineOptions) -> Iterator[Check]:
    """Whether programs, processor and memory are as they should be."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    names = ("numpy", "tokenizers", "jinja2", "typer")
    yield Check("packages", "ok", ", ".join(f"{name} {metadata.version(name)}" for name in names))
    yield _kernels()
    yield Check("processor", "ok", f"{machine.cpu_name()}, {machine.num_physical_cores()} cores for this process")
    yield _memory()
    yield from check_limits()
    yield check_driver()
    yield _devices(options)


def check_model(path: Path, options: EngineOptions) -> Iterator[Check]:
    """Whether a folder holds a model that can run here; reads no weights."""
    try:
        with Checkpoint.open(path) as checkpoint:
            yield from _check_open(checkpoint, options)
    except GlmGpuError as error:
        yield Check("model", "fail", str(error))
    else:
        yield from _check_text(path)


def _check_open(checkpoint: Checkpoint, options: EngineOptions) -> Iterator[Check]:
    config = checkpoint.config
    yield Check(
        "config",
        "ok",
        f"{checkpoint.path / 'config.json'}: {config.model_type}, {config.num_layers} layers, "
        f"{config.n_routed_experts} experts, {config.num_experts_per_tok} for each token",
    )
    yield _shards(checkpoint)
    opening = plan_opening(checkpoint, options)
    if config.mtp_layer is None:
        draft = "the model has no multi-token layer"
    else:
        draft = f"the multi-token layer {'too' if opening.has_mtp else 'is not among them'}"
    yield Check("tensors", "ok", f"{len(checkpoint.names)}, all that the model needs; {draft}")
    plan, num_slots = opening.plan, sum(opening.plan.num_slots.values())
    num_experts = len(opening.sizes.sparse_layers) * opening.sizes.num_experts
    yield Check(
        "fit",
        "ok",
        f"{format_bytes(plan.ram_bytes)} will be used: weights {format_bytes(plan.dense_bytes)}, {num_slots} of "
        f"{num_experts} experts {format_bytes(plan.slot_bytes)}, cache of {plan.context} tokens "
        f"{format_bytes(plan.cache_bytes)}",
    )


def _check_text(path: Path) -> Iterator[Check]:
    if not (path / "tokenizer.json").exists():
        yield Check(
            "tokenizer",
            "warn",
            f"{missing_file(path / 'tokenizer.json')}",
            "run and score work with --prompt-ids; chat does not",
        )
        return
    try:
        tokenizer = Tokenizer.open(path)
        yield Check("tokenizer", "ok", f"{tokenizer.vocab_size} tokens")
        template = ChatTemplate.open(path, tokenizer)
        yield Check("template", "ok", str(template.source))
    except GlmGpuError as error:
        yield Check("tokenizer", "fail", str(error))


def _kernels() -> Check:
    found = cpu.implementation()
    if found != "numpy":
        return Check("kernels", "ok", f"C extension, {found} ({', '.join(cpu.available()[1:])} can run here)")
    try:
        importlib.import_module("glm_gpu.kernels._cpu")
        reason = "it was switched off"
    except ImportError as error:
        reason = str(error)
    return Check(
        "kernels",
        "warn",
        f"no C extension ({reason}): everything runs on NumPy, many times slower",
        "install a C compiler (apt install gcc python3-dev) and install glm-gpu again",
    )


def _devices(options: EngineOptions) -> Check:
    """What would compute. The CPU is well on a machine without a card, and worth a look on one with."""
    try:
        devices, reason = open_devices(options.devices)
    except GlmGpuError as error:
        return Check("device", "fail", str(error))
    if devices:
        return Check("device", "warn" if reason else "ok", "; ".join(str(device.info) for device in devices), reason)
    is_meant = options.devices.kind == "cpu" or machine.gpu_absence() is not None
    return Check("device", "ok" if is_meant else "warn", "the CPU computes", "" if is_meant else reason)


def _memory() -> Check:
    found = machine.memory()
    limit = "" if found.limit is None else f", limited to {format_bytes(found.limit)} by the control group"
    text = f"{format_bytes(found.available)} available of {format_bytes(found.total)}{limit}"
    return Check("memory", "ok", text)


def _shards(checkpoint: Checkpoint) -> Check:
    num_bytes = sum(shard.stat().st_size for shard in checkpoint.shards)
    kind = "a container" if checkpoint.manifest else "a checkpoint"
    text = f"{kind} of {len(checkpoint.shards)} shards, {format_bytes(num_bytes)}"
    if not checkpoint.unused_shards:
        return Check("shards", "ok", text)
    names = ", ".join(shard.name for shard in checkpoint.unused_shards[:3])
    return Check(
        "shards",
        "warn",
        f"{text}; {len(checkpoint.unused_shards)} more that the index does not name ({names})",
        "remove them if they belong to another model",
    )
