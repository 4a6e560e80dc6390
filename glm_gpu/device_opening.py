"""A model put on devices as its plan says: weights, caches, memory for passes, then experts into what is left."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.device import Arena, Device
from glm_gpu.device_cache import DeviceCachePool
from glm_gpu.device_link import measure_link
from glm_gpu.model.device_footprint import device_pass_bytes
from glm_gpu.model.device_part import DevicePart, Ends, Workspace
from glm_gpu.model.device_transformer import DeviceTransformer
from glm_gpu.model.device_weights import arena_bytes, to_device
from glm_gpu.model.transformer import cache_layout
from glm_gpu.model.weights import WeightSource
from glm_gpu.opening import EngineOptions, Opening
from glm_gpu.session import PREFILL_CHUNK
from glm_gpu.tiers.device_plan import DevicePlan
from glm_gpu.tiers.device_store import DeviceStore
from glm_gpu.tiers.files import ExpertFiles
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.link import LinkRates
from glm_gpu.tiers.trace import TraceWriter, trace_header
from glm_gpu.tiers.vram_tier import VramTier

# What a simulated device is taken to have: both ways at the rate of PCIe 4.
SIMULATED_LINK = LinkRates(25e9, 25e9)


def open_on_devices(
    checkpoint: Checkpoint, opening: Opening, options: EngineOptions, heat: Heat, devices: Sequence[Device]
) -> DeviceTransformer:
    """The model that a plan with devices describes, ready to run. Closing its store gives the slots back.

    Raises:
        CheckpointError: a tensor cannot be read.
        CapacityError: a device has less memory left than it said.
    """
    config, plan = checkpoint.config, opening.plan
    layout, max_rows = cache_layout(config, is_bf16=True), min(PREFILL_CHUNK, options.num_contexts * plan.context)
    placed = [
        (device, replace(part, layers=tuple(layer for layer in part.layers if layer < config.num_hidden_layers)))
        for device, part in zip(devices, plan.devices, strict=True)
    ]
    placed = [(device, part) for device, part in placed if part.layers or part.has_ends]
    # while there is memory for it
    links = [SIMULATED_LINK if device.is_simulated else measure_link(device) for device, _ in placed]
    caches = DeviceCachePool(
        [(device, part.layers) for device, part in placed], layout, plan.context, options.num_contexts
    )
    source = WeightSource(checkpoint, config, options.recipe)
    parts = []
    for device, part in placed:
        num_bytes = device_pass_bytes(config, max_rows, plan.context)
        workspace = Workspace(config, len(part.layers), max_rows, Arena(device, num_bytes))
        arena = Arena(device, arena_bytes(part.dense_bytes, len(part.layers) + 1))
        layers = {layer: to_device(arena, source.layer(layer)) for layer in part.layers}
        ends = _ends(arena, source) if part.has_ends else None
        parts.append(DevicePart(device, config, layers, caches.offsets, ends, workspace))
    store = _open_store(checkpoint, opening, options, heat, placed, links)
    return DeviceTransformer(config, parts, store, caches)


def _ends(arena: Arena, source: WeightSource) -> Ends:
    embedding, norm, head = source.ends()
    above = to_device(arena, embedding)
    return Ends(above, to_device(arena, norm), above if head is embedding else to_device(arena, head))


def _open_store(
    checkpoint: Checkpoint,
    opening: Opening,
    options: EngineOptions,
    heat: Heat,
    placed: Sequence[tuple[Device, DevicePlan]],
    links: Sequence[LinkRates],
) -> DeviceStore:
    plan, config = opening.plan, checkpoint.config
    files = ExpertFiles(checkpoint, options.recipe, list(config.sparse_layers), plan.read_mode)
    is_elsewhere = np.zeros(heat.shape, bool)
    sparse = [any(config.is_sparse(layer) for layer in part.layers) for _, part in placed]
    tiers = [
        VramTier(
            device,
            {layer: files.layout(layer) for layer in part.layers if config.is_sparse(layer)},
            part.num_slots,
            part.num_transit,
            heat,
            is_elsewhere,
        )
        for device, part in compress(placed, sparse)
    ]
    return DeviceStore(
        files,
        plan.num_slots,
        heat,
        tiers,
        num_pinned=plan.num_pinned,
        num_read_threads=options.read_threads,
        prefetch="off",
        trace=options.trace and TraceWriter(options.trace, trace_header(files, opening.sizes)),
        is_elsewhere=is_elsewhere,
        links=list(compress(links, sparse)),
    )
