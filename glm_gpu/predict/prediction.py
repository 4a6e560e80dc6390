"""A prediction: a conversation routed through a plan and the store's policy, and what the cost model makes of it."""

from dataclasses import dataclass

import numpy as np

from glm_gpu.batch import Phase
from glm_gpu.predict.cost import HOST, Cost, Rates, Visits, passes_cost
from glm_gpu.predict.parts import Parts
from glm_gpu.predict.routing import (
    Router,
    RoutingProfile,
    learned_heat,
    popularity_of,
    published_profile,
    routings,
)
from glm_gpu.session import PREFILL_CHUNK
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.placement import TIERS
from glm_gpu.tiers.plan import Plan
from glm_gpu.tiers.policy import worth
from glm_gpu.tiers.replay import ByHeat, Policy, replay
from glm_gpu.tiers.sizes import ModelSizes
from glm_gpu.tiers.trace import Routing, Trace, TraceHeader

# A heat of fewer tokens says less about a user than the published profile says about the model.
LEAST_HEAT_TOKENS = 64


@dataclass(frozen=True)
class Workload:
    """A conversation: a prompt, an answer, and what its routing is drawn from."""

    prompt_tokens: int = 512
    new_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """How fast a plan will be.

    Attributes:
        prefill: the whole prompt.
        decode: one token of the answer, on average.
        hit_rate: decoding's experts that needed no disk.
        vram_rate: those that were on a device.
        prompt_tokens: of the prompt.
    """

    prefill: Cost
    decode: Cost
    hit_rate: float
    vram_rate: float
    prompt_tokens: int

    @property
    def tok_s(self) -> float:
        """Tokens a second while decoding; infinity where nothing takes time."""
        return 1 / self.decode.seconds if self.decode.seconds else float("inf")

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token of the answer."""
        return self.prefill.seconds


@dataclass(frozen=True)
class Conversation:
    """What is routed.

    Attributes:
        heat: what earlier texts left, which the plan is made from.
        routings: of the prompt and then the answer, in the order of the passes.
    """

    heat: Heat
    routings: list[Routing]


def draw_conversation(
    sizes: ModelSizes,
    num_layers: int,
    workload: Workload,
    heat: Heat | None = None,
    profile: RoutingProfile | None = None,
) -> Conversation:
    """Route a conversation as GLM-5.2's measured skew and reuse has it.

    Args:
        num_layers: L, the multi-token layer left out.
        heat: a user's own, which popularity then follows; None, or one that has seen little, for a drawn one.
        profile: the published one when not given.
    """
    profile = profile or published_profile()
    layers = [layer for layer in sizes.sparse_layers if layer < num_layers]
    shape = (len(layers), sizes.num_experts)
    popularity = None
    if heat is not None and heat.clock[layers].min() >= LEAST_HEAT_TOKENS:
        popularity = popularity_of(worth(heat, np.array(layers)), profile.spread)
    router = Router(profile, shape, sizes.experts_per_tok, workload.seed, popularity)
    if popularity is None:
        heat = learned_heat(router, layers, len(sizes.slab_nbytes), sizes.num_experts)
    drawn = router.draw(workload.prompt_tokens + workload.new_tokens)
    prompt, answer = drawn[: workload.prompt_tokens], drawn[workload.prompt_tokens :]
    return Conversation(
        heat, routings(prompt, layers, "prefill", PREFILL_CHUNK) + routings(answer, layers, "decode", 1)
    )


def predict(
    parts: Parts,
    sizes: ModelSizes,
    plan: Plan,
    rates: Rates,
    conversation: Conversation,
    policy: Policy | None = None,
) -> Prediction:
    """How fast a plan answers a conversation.

    Memory begins with the experts that the plan puts there; then the store's policy keeps and gives up. Experts on
    devices stay. What the page cache would hold counts as RAM.

    Args:
        policy: the store's own when not given.
    """
    on_device = plan.placement == TIERS.index("vram")
    in_memory = np.isin(plan.placement, [TIERS.index(name) for name in ("locked", "ram", "page cache")])
    cached = (plan.placement == TIERS.index("page cache")).sum(axis=1) @ np.array(sizes.slot_nbytes, np.int64)
    capacity = plan.slot_bytes + int(cached)
    header = TraceHeader("", len(sizes.slot_nbytes), sizes.num_experts, sizes.experts_per_tok, sizes.slot_nbytes)
    policy = policy or ByHeat(_copy(conversation.heat))
    trace = Trace(header, conversation.routings, False)
    if capacity:
        replayed = replay(trace, policy, max(capacity, max(sizes.slot_nbytes)), in_memory, on_device)
        num_ram, num_missing = replayed.num_hits, replayed.num_missed
    else:
        num_ram = num_missing = [0] * len(trace.routings)
    num_vram = [int(on_device[r.layer][np.unique(r.ids)].sum()) for r in trace.routings]
    places = np.full(parts.num_layers, HOST)
    for number, device in enumerate(plan.devices):
        places[[layer for layer in device.layers if layer < parts.num_layers]] = number

    tokens = {phase: trace.tokens(phase) for phase in ("prefill", "decode")}
    costs = {}
    for phase in ("prefill", "decode"):
        visits = _visits(parts.num_layers, trace.routings, phase, num_vram, num_ram, num_missing)
        positions = tokens["prefill"] / 2 if phase == "prefill" else tokens["prefill"] + tokens["decode"] / 2
        head_rows = 1 if phase == "prefill" else tokens["decode"]
        costs[phase] = (visits, passes_cost(parts, rates, places, visits, positions, head_rows, plan.is_streamed))
    visits, decode = costs["decode"]
    used = max(1, int((visits.vram + visits.ram + visits.missing).sum()))
    return Prediction(
        costs["prefill"][1],
        decode.scaled(1 / max(1, tokens["decode"])),
        1 - int(visits.missing.sum()) / used,
        int(visits.vram.sum()) / used,
        tokens["prefill"],
    )


def visits_of(table: np.ndarray, rows: np.ndarray | None = None) -> Visits:
    """Every layer of every pass.

    Args:
        table: [passes, L, 3], distinct experts on the layer's device, in RAM, and on disk.
        rows: [passes], of each; one when not given.
    """
    num_passes, num_layers, _ = table.shape
    layer = np.tile(np.arange(num_layers), num_passes)
    rows = np.ones(num_passes, np.int64) if rows is None else rows
    return Visits(layer, np.repeat(rows, num_layers), *table.reshape(-1, 3).T)


def _visits(
    num_layers: int, found: list[Routing], phase: Phase, vram: list[int], ram: list[int], missing: list[int]
) -> Visits:
    """Those of a phase, the layers without experts included."""
    rows, counts = [], []
    before = num_layers
    for routing, *count in zip(found, vram, ram, missing, strict=True):
        if routing.phase != phase or routing.layer >= num_layers:
            continue
        if routing.layer <= before:  # layers of a pass come in order, so this is the next pass
            rows.append(len(routing.ids))
            counts.append(np.zeros((num_layers, 3), np.int64))
        before = routing.layer
        counts[-1][routing.layer] = count
    table = np.array(counts) if counts else np.zeros((0, num_layers, 3), np.int64)
    return visits_of(table, np.array(rows, np.int64))


def _copy(heat: Heat) -> Heat:
    copied = Heat(*heat.shape, heat.half_lives)
    copied.restore(heat.arrays())
    return copied
