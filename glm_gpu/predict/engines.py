"""What an engine reaches of a machine's limits: from a described machine to rates."""

from dataclasses import dataclass

from glm_gpu.predict.cost import PlaceRates, Rates
from glm_gpu.predict.machines import Machine


@dataclass(frozen=True)
class Engine:
    """How well an engine uses hardware.

    Attributes:
        memory_share: of RAM's bandwidth that its kernels reach on experts, which one call computes together.
        dense_share: the same on matrices that have a call each.
        device_memory_share: of devices' memory.
        core_gb_s: packed weights that one core gets through at most, where memory is faster.
        core_gmac_s, core_dense_gmac_s: multiply-adds of one core in a prompt's pass, with experts, which have few of
            its rows, and with single matrices, which have all. A machine's file may say the first; the other follows.
        device_mac_share: of a device's peak while rows are many.
        layer_s, device_layer_s: seconds that a layer costs beside its weights, on the host and on a device.
    """

    memory_share: float
    dense_share: float
    device_memory_share: float
    core_gb_s: float
    core_gmac_s: float
    core_dense_gmac_s: float
    device_mac_share: float
    layer_s: float
    device_layer_s: float


# This engine. Host figures are of two cores of a Xeon with AVX-512 VNNI (`glm-gpu bench decode`, bench/predict.py);
# those of devices are goals for its GPU kernels, not measurements.
GLM_GPU = Engine(
    memory_share=0.80,
    dense_share=0.65,
    device_memory_share=0.70,
    core_gb_s=25.0,
    core_gmac_s=45.0,
    core_dense_gmac_s=70.0,
    device_mac_share=0.4,
    layer_s=0.6e-3,
    device_layer_s=30e-6,
)


def machine_rates(machine: Machine, engine: Engine) -> Rates:
    """How fast an engine is on a described machine."""
    cores = machine.cores * (1.0 if machine.core_gmac_s is None else machine.core_gmac_s / engine.core_gmac_s)
    most_gb_s = machine.cores * engine.core_gb_s
    host = PlaceRates(
        min(machine.memory_gb_s * engine.memory_share, most_gb_s),
        cores * engine.core_gmac_s,
        engine.layer_s,
        min(machine.memory_gb_s * engine.dense_share, most_gb_s),
        cores * engine.core_dense_gmac_s,
    )
    devices = tuple(
        PlaceRates(
            gpu.memory_gb_s * engine.device_memory_share,
            gpu.tflops * 1e3 / 2 * engine.device_mac_share,  # an operation is half a multiply-add
            engine.device_layer_s,
        )
        for gpu in machine.gpus
    )
    return Rates(
        host,
        machine.disk_gb_s,
        machine.disk_latency_ms / 1e3,
        devices,
        tuple(gpu.copy_gb_s for gpu in machine.gpus),
    )
