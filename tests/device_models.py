"""Helpers of the tests on simulated devices: options, memory for a share of the experts, greedy tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.device_choice import DeviceRequest
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.opening import EngineOptions, plan_opening

CONTEXT = 64


@dataclass(frozen=True)
class Needs:
    """What a model takes on one simulated device.

    Attributes:
        kept_bytes: all that is not experts and not a pass.
        pass_bytes, slot_bytes: the largest pass; an expert.
        num_experts: in all layers.
    """

    kept_bytes: int
    pass_bytes: int
    slot_bytes: int
    num_experts: int


def options_for(path: Path | None, **changes) -> EngineOptions:
    """Sixteen bits for the oracle's tiny models, the demo as it is stored."""
    widths = {} if path is None else {"expert_bits": 16, "dense_bits": 16}
    return EngineOptions(**({"context": CONTEXT, "speculate": "off"} | widths | changes))


def needs(path: Path | None) -> Needs:
    """From the plan for a device that holds everything."""
    with Checkpoint.open(path or DEMO_MODEL) as checkpoint:
        (plan,) = plan_opening(checkpoint, options_for(path, devices=on_devices(1 << 30))).plan.devices
    ((slot_bytes, num_experts),) = plan.num_slots.items()
    reserve = (1 << 30) - plan.free_bytes
    return Needs(reserve + plan.dense_bytes + plan.cache_bytes, plan.pass_bytes, slot_bytes, num_experts)


def on_devices(*sizes: int) -> DeviceRequest:
    """Simulated devices of these sizes."""
    return DeviceRequest(f"sim:{len(sizes)}", vram=",".join(map(str, sizes)))


def greedy(engine: Engine, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], np.ndarray]:
    """Tokens after a prompt, and the logits of the prompt and of every step: [prompt + num_tokens - 1, V]."""
    cache = engine.model.new_cache(engine.context, is_bf16=True)
    rows = [engine.model.forward(Batch.of([(prompt_ids, cache)], "prefill", all_logits=True)).logits]
    ids = [int(np.argmax(rows[0][-1]))]
    while len(ids) < num_tokens:
        rows.append(engine.model.forward(Batch.of([(ids[-1:], cache)], "decode", all_logits=True)).logits)
        ids.append(int(np.argmax(rows[-1][-1])))
    return ids, np.concatenate(rows)
