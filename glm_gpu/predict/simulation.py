"""A whole model on a described machine, through the real planner and policy, without a weight."""

from dataclasses import dataclass
from pathlib import Path

from glm_gpu.config import ModelConfig
from glm_gpu.json_file import read_json_object
from glm_gpu.machine import Memory
from glm_gpu.opening import EngineOptions, demand_of
from glm_gpu.predict.cost import Rates
from glm_gpu.predict.engines import GLM_GPU, machine_rates
from glm_gpu.predict.machines import Machine
from glm_gpu.predict.parts import Parts, PlannedContainer, model_parts
from glm_gpu.predict.prediction import Conversation, Prediction, Workload, draw_conversation, predict
from glm_gpu.tiers.budget import DeviceBudget, host_budget
from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.plan import Plan, make_plan
from glm_gpu.tiers.sizes import ModelSizes, model_sizes

GLM_5_2 = Path(__file__).with_name("glm-5.2.json")
# What the program takes before it loads a model: interpreter, libraries, tokenizer.
_BASE_BYTES = 200 << 20


@dataclass(frozen=True)
class Simulation:
    """What a machine would do: the plan, what was routed through it, and how fast that is."""

    plan: Plan
    sizes: ModelSizes
    parts: Parts
    rates: Rates
    conversation: Conversation
    prediction: Prediction


def glm_config() -> ModelConfig:
    """The config of GLM-5.2, which ships with the package."""
    return ModelConfig.from_dict(read_json_object(GLM_5_2), str(GLM_5_2))


def simulate(
    machine: Machine,
    options: EngineOptions,
    workload: Workload,
    config: ModelConfig | None = None,
    heat: Heat | None = None,
) -> Simulation:
    """Plan a model for a machine and answer a conversation there.

    Args:
        options: formats, context and memory; as for a real engine. The multi-token layer is not used.
        config: GLM-5.2's when not given.
        heat: a user's own.

    Raises:
        CapacityError: the machine cannot hold the least that a pass needs.
    """
    config = config or glm_config()
    container = PlannedContainer(config, options.recipe)
    sizes = model_sizes(container, options.recipe, with_mtp=False)
    free = machine.ram_bytes - machine.used_bytes
    memory = Memory(machine.ram_bytes, free - _BASE_BYTES, None, None, f"the machine {machine.name}")
    devices = tuple(DeviceBudget(f"gpu {n}", gpu.vram_bytes, 0) for n, gpu in enumerate(machine.gpus))
    budget = host_budget(memory, _BASE_BYTES, options.ram, devices)
    parts, rates = model_parts(config, options.recipe), machine_rates(machine, GLM_GPU)
    conversation = draw_conversation(sizes, parts.num_layers, workload, heat)
    demand = demand_of(config, options, with_mtp=False, is_numpy=False, has_devices=bool(devices))
    plan = make_plan(sizes, budget, demand, conversation.heat)
    return Simulation(plan, sizes, parts, rates, conversation, predict(parts, sizes, plan, rates, conversation))
