"""A model put on devices as its plan says: weights, caches, memory for passes, then experts into what is left."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from glm_gpu.cache import CacheLayout
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.device import Arena, Device
from glm_gpu.device_cache import DeviceCachePool
from glm_gpu.device_link import measure_link
from glm_gpu.model.device_footprint import device_pass_bytes
from glm_gpu.model.device_mtp import DeviceMtpHead
from glm_gpu.model.device_part import DevicePart, Draft, Ends, Workspace
from glm_gpu.model.device_transformer import DeviceTransformer
from glm_gpu.model.device_weights import arena_bytes, to_device
from glm_gpu.model.transformer import cache_layout, latent_streams
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
) -> tuple[DeviceTransformer, DeviceMtpHead | None]:
    """The model that a plan with devices describes, ready to run, and its multi-token layer where the plan has it.

    Closing the model's store gives the slots back.

    Raises:
        CheckpointError: a tensor cannot be read.
        CapacityError: a device has less memory left than it said.
    """
    config, plan = checkpoint.config, opening.plan
    layout, max_rows = cache_layout(config, is_bf16=True), min(PREFILL_CHUNK, options.num_contexts * plan.context)
    num_layers = config.num_hidden_layers + opening.loads_mtp
    placed = [
        (device, replace(part, layers=tuple(layer for layer in part.layers if layer < num_layers)))
        for device, part in zip(devices, plan.devices, strict=True)
    ]
    placed = [(device, part) for device, part in placed if part.layers or part.has_ends]
    trunk = [[layer for layer in part.layers if layer < config.num_hidden_layers] for _, part in placed]
    # while there is memory for it
    links = [SIMULATED_LINK if device.is_simulated else measure_link(device) for device, _ in placed]
    caches = DeviceCachePool(
        [(device, layers) for (device, _), layers in zip(placed, trunk, strict=True)],
        layout,
        plan.context,
        options.num_contexts,
    )
    draft_caches = None
    if opening.loads_mtp:
        (device,) = (device for device, part in placed if config.mtp_layer in part.layers)
        draft_layout = CacheLayout((latent_streams(config, True),), is_bf16=True)
        draft_caches = DeviceCachePool([(device, [0])], draft_layout, plan.context, options.num_contexts)
    source = WeightSource(checkpoint, config, options.recipe)
    parts = []
    for (device, part), trunk_layers in zip(placed, trunk, strict=True):
        num_bytes = device_pass_bytes(config, max_rows, plan.context, opening.loads_mtp)
        has_draft = opening.loads_mtp and config.mtp_layer in part.layers
        workspace = Workspace(config, len(part.layers), max_rows, Arena(device, num_bytes), has_draft)
        arena = Arena(device, arena_bytes(part.dense_bytes, len(part.layers) + 1))
        layers = {layer: to_device(arena, source.layer(layer)) for layer in trunk_layers}
        draft = Draft(to_device(arena, source.mtp()), draft_caches.offsets[0]) if has_draft else None
        ends = _ends(arena, source) if part.has_ends else None
        parts.append(DevicePart(device, config, layers, caches.offsets, ends, workspace, draft))
    store = _open_store(checkpoint, opening, options, heat, placed, links)
    model = DeviceTransformer(config, parts, store, caches)
    if draft_caches is None:
        return model, None
    return model, DeviceMtpHead(model, next(part for part in parts if part.draft is not None), draft_caches)


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
    layers = [layer for _, part in placed for layer in part.layers if config.is_sparse(layer)]
    files = ExpertFiles(checkpoint, options.recipe, layers, plan.read_mode)
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
        prefetch=options.prefetch,
        trace=options.trace and TraceWriter(options.trace, trace_header(files, opening.sizes)),
        is_elsewhere=is_elsewhere,
        links=list(compress(links, sparse)),
    )
