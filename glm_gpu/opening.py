"""What opening a model comes to, decided from headers and numbers alone: formats, context, where everything goes."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from glm_gpu import machine
from glm_gpu.cache import CacheLayout
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.device import Device, aligned
from glm_gpu.device_choice import DeviceRequest, open_devices
from glm_gpu.errors import CapacityError, CheckpointError, RequestError
from glm_gpu.kernels import cpu
from glm_gpu.model.device_footprint import device_pass_bytes
from glm_gpu.model.device_weights import arena_bytes, check_widths
from glm_gpu.model.footprint import pass_bytes
from glm_gpu.model.transformer import cache_layout, latent_streams
from glm_gpu.recipe import DEFAULT_ROUNDING, Recipe, Rounding, tensor_class
from glm_gpu.session import PREFILL_CHUNK
from glm_gpu.speculative import SpeculateMode
from glm_gpu.tensors import expected_tensors, validate_tensors
from glm_gpu.tiers.budget import DEVICE_RESERVE, DeviceBudget, host_budget
from glm_gpu.tiers.files import ReadMode
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.plan import Demand, Plan, make_plan
from glm_gpu.tiers.prefetch import PrefetchMode
from glm_gpu.tiers.sizes import ModelSizes, model_sizes

# What a context takes when none is asked for; GLM-5.2 itself allows 1,048,576 positions, 90 GiB of cache.
DEFAULT_CONTEXT = 8192
ON_CPU = DeviceRequest("cpu")


@dataclass(frozen=True)
class EngineOptions:
    """How a model is opened; what is None comes from the checkpoint or the machine.

    Args:
        expert_bits: 16, 8, 4 or 2 for routed experts; of a stored container, only what it holds.
        dense_bits: the same for attention, dense MLPs and shared experts.
        group: columns that share a scale at four bits: 64, 128, or 0 for whole rows.
        rounding: how weights are put into their formats while they are loaded; "rtn" to nearest, "search" with the
            scales of least error. A container is as it was converted.
        weights: "f32" keeps every weight as f32, as the reference does.
        activations: "int16", "int8" or "f32": what activations are rounded to before packed weights.
        kv: format of the cache; "auto" is bf16, and f32 beside f32 weights.
        context: positions that a session can hold.
        threads: of the kernels.
        ram: bytes that this process may hold.
        fast_math: allow kernels whose last bits depend on how a prompt is cut.
        speculate: which drafts are verified: "auto" takes those that pay, "mtp", "ngram" and "grammar" one kind alone
            and always, "off" none.
        expert_slots: at most so many experts in memory, all layers together.
        prefetch: whether to read what the next layer will probably use; "auto" measures.
        read: how experts are read; "auto" goes by the memory that is left for the page cache.
        read_threads: expert reads in flight at once.
        trace: a file to record every routing choice in.
        state: the folder where heat is kept between runs; None to begin without any and keep none.
        is_heat_read_only: use the heat that is kept, and leave it as it is.
        num_contexts: full contexts that memory is kept for; a server's sequences share them.
        is_shared: they do: rows are in pages of the host, whatever computes.
        devices: what computes. The library's default is the CPU; commands take GPUs where there are any.
    """

    expert_bits: int | None = None
    dense_bits: int | None = None
    group: int | None = None
    rounding: Rounding = DEFAULT_ROUNDING
    weights: Literal["auto", "f32"] = "auto"
    activations: Literal["int16", "int8", "f32"] = "int16"
    kv: Literal["auto", "bf16", "f32"] = "auto"
    context: int | None = None
    threads: int | None = None
    ram: int | None = None
    fast_math: bool = False
    speculate: SpeculateMode = "auto"
    expert_slots: int | None = None
    prefetch: PrefetchMode = "auto"
    read: ReadMode | Literal["auto"] = "auto"
    read_threads: int = 4
    trace: Path | None = None
    state: Path | None = None
    is_heat_read_only: bool = False
    num_contexts: int = 1
    is_shared: bool = False
    devices: DeviceRequest = ON_CPU

    @property
    def recipe(self) -> Recipe:
        """The formats asked for.

        Raises:
            RequestError: a width or group that no format has, or widths together with f32 weights.
        """
        widths = (self.expert_bits, self.dense_bits, self.group)
        if self.weights == "f32":
            if widths != (None, None, None):
                raise RequestError(
                    "--weights f32 keeps all weights as they are; drop --expert-bits, --dense-bits, --group"
                )
            return Recipe.float32()
        expert_bits, dense_bits, group = (
            default if value is None else value for value, default in zip(widths, (4, 4, 64), strict=True)
        )
        return Recipe.from_bits(expert_bits, dense_bits, group).rounded(self.rounding)

    @property
    def row_format(self) -> str:
        """Which of these options the bits of cached rows depend on, as text."""
        recipe = hashlib.sha256(repr(self.recipe).encode()).hexdigest()[:8]
        fast = " fast-math" if self.fast_math else ""
        return f"{'bf16' if self.is_kv_bf16 else 'f32'} {self.activations} {recipe}{fast}"

    @property
    def is_kv_bf16(self) -> bool:
        return self.kv == "bf16" or (self.kv == "auto" and self.weights != "f32")


@dataclass(frozen=True)
class Opening:
    """What opening a model comes to.

    Attributes:
        plan: where everything will live; the engine is built from it.
        sizes: what it was made from.
        has_mtp, loads_mtp: whether the checkpoint has the multi-token layer, and whether it will be used.
        devices: what computes, in the order of the plan's; none for the CPU.
        device_reason: why there are no devices, or no more of them; "" when nothing is missing.
    """

    plan: Plan
    sizes: ModelSizes
    has_mtp: bool
    loads_mtp: bool
    devices: tuple[Device, ...] = ()
    device_reason: str = ""


def plan_opening(checkpoint: Checkpoint, options: EngineOptions, heat: Heat | None = None) -> Opening:
    """Check that a model can be opened with these options and plan where it goes; reads no weights.

    Drafts by the multi-token layer pay only while nothing is read from disk, so "auto" loads it when all experts fit.

    Where GPUs are used only because they are there, and cannot hold the model or do what is asked, the CPU computes.

    Raises:
        CheckpointError: a weight is missing or has another shape.
        CapacityError: the least that a pass needs does not fit.
        RequestError: options contradict each other or the checkpoint.
    """
    has_mtp = validate_tensors(checkpoint.config, checkpoint)
    if options.speculate == "mtp" and not has_mtp:
        raise CheckpointError(
            f"{checkpoint.path}: no MTP head in this checkpoint, which --speculate mtp needs; use another --speculate, "
            "or convert the model again from a source that has the layer"
        )
    _check_stored(checkpoint, options)
    devices, reason = open_devices(options.devices)
    if devices:
        try:
            _check_devices(checkpoint, options)
            # what queries meet is rounded to bf16 on a device, so that f32 rows would gain nothing
            found = _plan_with_drafts(checkpoint, replace(options, kv="bf16"), heat, has_mtp, devices)
            return replace(found, devices=tuple(devices), device_reason=reason)
        except (CapacityError, RequestError) as error:
            if options.devices.is_asked:
                raise
            reason = str(error)
    return replace(_plan_with_drafts(checkpoint, options, heat, has_mtp), device_reason=reason)


def _plan_with_drafts(
    checkpoint: Checkpoint,
    options: EngineOptions,
    heat: Heat | None,
    has_mtp: bool,
    devices: Sequence[Device] = (),
) -> Opening:
    """The plan with the multi-token layer where it is asked for or pays, without it otherwise."""
    plan, sizes = _plan(checkpoint, options, heat, options.speculate == "mtp", devices)
    if options.speculate == "auto" and has_mtp and _holds_all(plan, sizes):
        with suppress(CapacityError):
            plan_with, sizes_with = _plan(checkpoint, options, heat, True, devices)
            if _holds_all(plan_with, sizes_with):
                return Opening(plan_with, sizes_with, has_mtp, loads_mtp=True)
    return Opening(plan, sizes, has_mtp, loads_mtp=options.speculate == "mtp")


def _plan(
    checkpoint: Checkpoint,
    options: EngineOptions,
    heat: Heat | None,
    with_mtp: bool,
    devices: Sequence[Device] = (),
) -> tuple[Plan, ModelSizes]:
    config = checkpoint.config
    sizes = model_sizes(checkpoint, options.recipe, with_mtp)
    demand = demand_of(config, options, with_mtp, cpu.implementation() == "numpy", has_devices=bool(devices))
    budgets = tuple(_device_budget(device, config, options.num_contexts) for device in devices)
    budget = host_budget(machine.memory(), machine.anon_rss_bytes(), options.ram, budgets)
    return make_plan(sizes, budget, demand, heat), sizes


def demand_of(config: ModelConfig, options: EngineOptions, with_mtp: bool, is_numpy: bool, has_devices: bool) -> Demand:
    """What a model with these options is planned for.

    Args:
        with_mtp: the multi-token layer is used.
        is_numpy: the C kernels are not, whose passes take less memory.
        has_devices: passes run on devices.

    Raises:
        RequestError: a context that the model was not made for.
    """
    is_bf16, explicit = options.is_kv_bf16, options.fast_math
    widths = [*cache_layout(config, is_bf16).widths, latent_streams(config, True) if with_mtp else {}]

    def on_host(context: int) -> int:
        num_rows = min(PREFILL_CHUNK, context)
        if not has_devices:
            return pass_bytes(config, num_rows, context, is_numpy=is_numpy, explicit_prefill=explicit)
        results = num_rows * (config.vocab_size + config.hidden_size) * 4
        shared = options.num_contexts * context * cache_layout(config, True).bytes_per_token
        return results + (shared if options.is_shared else 0)

    def on_device(context: int) -> int:
        return device_pass_bytes(config, min(PREFILL_CHUNK, options.num_contexts * context), context, with_mtp)

    return Demand(
        context=_context(options.context, config.max_position_embeddings),
        is_context_asked=options.context is not None,
        cache_bytes_per_token=tuple(CacheLayout((streams,), is_bf16).bytes_per_token for streams in widths),
        pass_bytes=on_host,
        num_read_threads=options.read_threads,
        expert_slots=options.expert_slots,
        read_mode=options.read,
        num_contexts=options.num_contexts,
        device_pass_bytes=on_device if has_devices else None,
    )


def _device_budget(device: Device, config: ModelConfig, num_contexts: int) -> DeviceBudget:
    """What a device may be filled with: its own free memory, less what alignment and tables of addresses take."""
    free_bytes, total_bytes = device.memory()
    num_layers = config.num_hidden_layers + 1
    row_bytes = 8 * (config.n_routed_experts + 32)
    small = arena_bytes(0, num_layers + 1) + num_layers * (row_bytes + 2 * num_contexts * aligned(1)) + 16 * row_bytes
    reserve_bytes = small if device.is_simulated else small + DEVICE_RESERVE
    return DeviceBudget(device.info.name, total_bytes, total_bytes - free_bytes, reserve_bytes)


def _check_devices(checkpoint: Checkpoint, options: EngineOptions) -> None:
    """Refuse what only the CPU can do."""
    check_widths(checkpoint.config)
    if options.kv == "f32":
        raise RequestError("--kv f32 is the CPU's; a GPU caches bf16. Drop it, or use --device cpu")


def _holds_all(plan: Plan, sizes: ModelSizes) -> bool:
    """Whether nothing will have to be read again."""
    num_experts = len(sizes.sparse_layers) * sizes.num_experts
    num_placed = sum(plan.num_slots.values()) + sum(device.num_experts for device in plan.devices)
    return not plan.is_streamed and num_placed >= num_experts


def _context(asked: int | None, longest: int) -> int:
    if asked is None:
        return min(longest, DEFAULT_CONTEXT)
    if not 2 <= asked <= longest:
        raise RequestError(f"--context is {asked}, expected 2 to {longest}, the longest this model was made for")
    return asked


def _check_stored(checkpoint: Checkpoint, options: EngineOptions) -> None:
    """Refuse widths that were asked for by name and differ from what a container stores."""
    asked, recipe = {"expert": options.expert_bits, "dense": options.dense_bits}, options.recipe
    for name in expected_tensors(checkpoint.config):
        kind = tensor_class(name, checkpoint.config)
        stored = checkpoint.stored(name)
        if stored is None or kind not in asked:
            continue
        wanted = recipe.format_for(name, checkpoint.config)
        is_asked = asked[kind] is not None or (options.group is not None and stored.format.bits == 4)
        if is_asked and wanted.is_packed and wanted != stored.format:
            raise RequestError(
                f"{checkpoint.path} stores its {kind} weights as {stored.format.name}, asked for as {wanted.name}; "
                f"drop --expert-bits, --dense-bits and --group, or convert the model again"
            )
        asked.pop(kind)
        if not asked:
            return
