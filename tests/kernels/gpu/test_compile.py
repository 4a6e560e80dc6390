"""Every kernel is compiled for every architecture at GLM-5.2's dimensions, and its machine code held to budgets."""

import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from device_shapes import Dimensions, record_others, record_products
from sass import compile_one

from glm_gpu.kernels.gpu.product import BLOCK_M
from glm_gpu.kernels.launch import Recorder

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing when it interprets", allow_module_level=True)

ARCHS = (80, 89, 90, 100, 120)
# Tiles of 64 rows, on the oldest cards and on those that have an instruction of their own for them.
WIDE_ARCHS = (80, 90)
# Each format and type of activations and scales somewhere; those that are the default everywhere.
DEFAULT = ("int4_g64", "bf16", "f32")
OTHERS = {
    80: [("int4_g64", "f16", "f16")],
    89: [("int4", "bf16", "f32"), ("int2", "bf16", "f32")],
    90: [("int4_g64", "f16", "f32"), ("int8", "bf16", "f32"), ("f32", "bf16", "f32")],
    100: [("int4_g128", "bf16", "f16")],
    120: [("int8", "f16", "f32"), ("bf16", "bf16", "f32")],
}


@pytest.fixture(scope="module")
def compiled():
    """(arch, specialization, code, bytes of shared memory, bits of each parameter) of each kernel."""
    work = []
    for arch in ARCHS:
        recorder, others = Recorder(), Recorder()
        record_products(recorder, 1, *DEFAULT, Dimensions())
        record_others(recorder, 1, *DEFAULT, Dimensions())
        if arch in WIDE_ARCHS:
            record_products(recorder, 2048, *DEFAULT, Dimensions())
        for form in OTHERS[arch]:
            # many rows in the type that models have; f16 would spill two registers there
            for num_rows in (1, 2048) if arch in WIDE_ARCHS and form[1] == "bf16" else (1,):
                record_products(others, num_rows, *form, Dimensions())
            record_others(others, 1, *form, Dimensions())
        # one kernel with one product in its loop and one with two stand for the rest, which differ in their edges only
        names = ("expert_output_kernel", "expert_hidden_kernel", "absorb_kernel", "embed_kernel")
        work += [(s, arch) for s in recorder.specializations]
        work += [(s, arch) for s in others.specializations if s.kernel.name in names]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        return list(pool.map(compile_one, *zip(*work, strict=True), chunksize=4))


def products(compiled):
    """Those that multiply packed weights in a loop over their columns."""
    for arch, specialization, code, *_ in compiled:
        constants = dict(specialization.constants)
        if "BLOCK_K" in constants and "BITS" in constants:
            yield f"{specialization.kernel.name} {constants} sm_{arch}", specialization, constants, code


def test_nothing_spills(compiled):
    spilling = [f"{s.kernel.name} sm_{arch}" for arch, s, code, *_ in compiled if code.count("LDL|STL")]
    assert not spilling


def test_parameters_are_those_that_a_launch_passes(compiled):
    sizes = {"*": 64, "i64": 64, "i32": 32, "fp32": 32}
    for arch, specialization, _, _, parameters in compiled:
        expected = [sizes[type if type in sizes else type[0]] for _, type in specialization.types]
        # the last two are scratch memory, which launches leave out
        assert parameters == [*expected, 64, 64], (specialization.kernel.name, arch)


def test_shared_memory_fits_every_card_of_the_architecture(compiled):
    """99 KiB a block is what 8.6, 8.9 and 12.0 allow."""
    for arch, specialization, _, shared_bytes, _ in compiled:
        assert shared_bytes <= 99 * 1024, (specialization.kernel.name, arch, shared_bytes)


def test_weights_are_read_16_bytes_at_a_time_and_asynchronously(compiled):
    for name, _, _, code in products(compiled):
        assert code.count(r"LDGSTS.*128"), name


def test_weights_are_multiplied_by_tensor_cores(compiled):
    for name, _, _, code in products(compiled):
        assert code.count("HMMA|HGMMA|UTCHMMA"), name


def test_tiles_of_16_and_64_rows_are_made_of_the_same_tensor_core_instruction(compiled):
    """Then a row's sums are made in the same order in both. HGMMA would be another one."""
    used = {}
    for name, specialization, constants, code in products(compiled):
        key = name.split("sm_")[1], specialization.types, constants["BITS"]
        used.setdefault(key, set()).update(i for i in code.instructions if "MMA" in i)
    assert all(len(instructions) == 1 for instructions in used.values()), used


# Instructions of a thread for each weight it handles, in the innermost loop of decoding. At full memory speed an H200
# has 3.5 for four bits, an A100 4.8 (from their data sheets); eight bits have twice as many.
BUDGETS = {4: 2.5, 8: 5.0}


def test_instructions_a_weight_stay_in_their_budget(compiled):
    for name, specialization, constants, code in products(compiled):
        if constants["BITS"] not in BUDGETS or constants["BLOCK_M"] != BLOCK_M:
            continue
        step = constants["BLOCK_N"] * constants["BLOCK_K"] * constants["UNROLL"]
        loop = max(code.loops, key=lambda loop: sum(loop.values()))
        assert any(re.match("HMMA|HGMMA|UTCHMMA", instruction) for instruction in loop), name
        instructions = sum(loop.values()) * 32 * specialization.kernel.num_warps / step
        assert instructions <= BUDGETS[constants["BITS"]], (name, instructions)


def test_cached_rows_are_read_asynchronously(compiled):
    names = ("attend_kernel",)
    for arch, specialization, code, *_ in compiled:
        if specialization.kernel.name in names:
            assert code.count(r"LDGSTS.*128") and code.count("HMMA|HGMMA|UTCHMMA"), arch
