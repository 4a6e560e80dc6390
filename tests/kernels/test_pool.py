"""The thread pool: every chunk once, no data race, safe to fork, and quiet when idle."""

import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from product_weights import random_matrix
from waiting import LONG_S

from glm_gpu.kernels import cpu
from glm_gpu.kernels.matmul import matmul

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

built = pytest.mark.skipif(len(cpu.available()) == 1, reason="the C extension is not built")


@pytest.fixture
def two_threads():
    before = cpu.get_threads()
    cpu.set_threads(2)
    yield
    cpu.set_threads(before)


@pytest.fixture
def product():
    """A product large enough for several chunks, and its right answer."""
    rng = np.random.default_rng(1)
    w = random_matrix(rng, "int4_g64", 500, 256)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    return x, w, matmul(x, w)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-g", "-fsanitize=thread")])
def test_every_chunk_runs_once_without_a_race(tmp_path, flags):
    program = tmp_path / "stress"
    sources = [ROOT / "bench/pool_stress.c", ROOT / "kernels/csrc/pool.c"]
    command = [COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags, "-I", ROOT / "kernels/csrc", *sources]
    made = subprocess.run([*command, "-lpthread", "-o", program], capture_output=True, text=True)
    if made.returncode != 0 and "-fsanitize=thread" in flags:
        pytest.skip("this compiler has no thread sanitizer")
    assert made.returncode == 0, made.stderr
    for num_threads in ("2", "3"):
        # the sanitizer by itself ends a forked child that starts threads
        environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
        command = [program, num_threads, "2000"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=environment)
        if "unexpected memory mapping" in ran.stderr:
            pytest.skip("this kernel's address randomisation is too wide for the thread sanitizer")
        assert ran.stdout == "ok\n" and ran.returncode == 0, ran.stdout + ran.stderr


@built
def test_idle_workers_use_no_processor_time(two_threads, product):
    x, w, _ = product

    def used_s():
        matmul(x, w)
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        return time.process_time() - before

    # what other threads of the process take comes and goes; workers that never slept would take it all each time
    assert any(used_s() < 0.05 for _ in range(3))


@built
def test_a_forked_child_computes(two_threads, product):
    x, w, expected = product

    def compute(queue):
        queue.put(matmul(x, w))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=compute, args=(queue,))
    child.start()
    result = queue.get(timeout=LONG_S)
    child.join()
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(matmul(x, w), expected)


@built
def test_callers_at_the_same_time_all_get_their_own_results(two_threads):
    rng = np.random.default_rng(2)
    w = random_matrix(rng, "int8", 300, 128)
    inputs = [rng.standard_normal((2, 128)).astype(np.float32) for _ in range(4)]
    expected = [matmul(x, w) for x in inputs]
    wrong = []

    def call(x, right):
        for _ in range(200):
            if not np.array_equal(matmul(x, w), right):
                wrong.append(x)

    callers = [threading.Thread(target=call, args=pair) for pair in zip(inputs, expected, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@built
def test_number_of_threads_is_what_was_set(two_threads):
    for num_threads in (1, 3, 2):
        cpu.set_threads(num_threads)
        assert cpu.get_threads() == num_threads
    for bad in (0, -1, 257):
        with pytest.raises(ValueError, match="num_threads"):
            cpu.set_threads(bad)


def test_an_unknown_implementation_is_refused():
    before = cpu.implementation()
    with pytest.raises(ValueError, match="expected one of numpy"), cpu.use("mmx"):
        pass
    assert cpu.implementation() == before
