"""Fixtures of the kernels' tests: run on every implementation, and compare all of them bit for bit."""

import numpy as np
import pytest

from glm_gpu.kernels import cpu

THREADS = (1, 2, 3)


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        # A test that compares all implementations need not run on each of them.
        names = ["numpy"] if "same_bits" in metafunc.fixturenames else cpu.available()
        metafunc.parametrize("implementation", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def implementation(request):
    """Runs a module's tests once on each implementation this machine has; yields its name."""
    with cpu.use(request.param):
        yield request.param


@pytest.fixture
def same_bits(monkeypatch):
    """same_bits(call): call() gives NumPy's bits on every instruction set and number of threads.

    Outputs begin as NaN (integers as a value no kernel writes), so that an element nobody writes is seen.
    """

    def filled(shape, dtype=float, **options):
        a = real_empty(shape, dtype=dtype, **options)
        a.fill(np.nan if np.issubdtype(a.dtype, np.floating) else np.iinfo(a.dtype).max)
        return a

    def bits(result):
        arrays = result if isinstance(result, tuple) else (result,)
        return [(a.dtype, a.shape, a.tobytes()) for a in arrays]

    def check(call):
        with cpu.use("numpy"):
            expected = bits(call())
        for name in cpu.available()[1:]:
            for num_threads in THREADS:
                cpu.set_threads(num_threads)
                with cpu.use(name):
                    assert bits(call()) == expected, f"{name} with {num_threads} threads differs from NumPy"

    real_empty = np.empty
    monkeypatch.setattr(np, "empty", filled)
    before = cpu.get_threads()
    yield check
    cpu.set_threads(before)
