import pytest

from glm_gpu.errors import DeviceError
from glm_gpu.kernels import cpu
from glm_gpu.kernels.limits import multiply_add_flops, read_bytes_s

pytestmark = pytest.mark.usefixtures("implementation")


def test_limits_are_of_a_plausible_size(implementation):
    if implementation == "numpy":
        pytest.skip("measured by the C kernels")
    assert 1e8 < read_bytes_s(8 << 20) < 1e13
    assert 1e8 < multiply_add_flops() < 1e14


def test_without_the_extension_limits_are_refused():
    with cpu.use("numpy"), pytest.raises(DeviceError, match="compiler"):
        multiply_add_flops()
