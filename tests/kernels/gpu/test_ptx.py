import numpy as np
import pytest

from glm_gpu.kernels.simulator import ptx

X = np.array([0x12345678, 0xFFFF0000], np.uint32)


def run(body, *inputs):
    return ptx.run("{" + body + "}", 1, list(inputs))[0].tolist()


def test_bit_operations_are_those_of_the_instruction_set():
    assert run("shr.u32 $0, $1, 8;", X) == [0x00123456, 0x00FFFF00]
    assert run("xor.b32 $0, $1, 0x80808080;", X) == [0x92B4D6F8, 0x7F7F8080]
    # 0xea is (a & b) | c
    assert run("lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea;", X) == [0x64046408, 0x640F6400]
    assert run("prmt.b32 $0, $1, $2, 0x5410;", X, X[::-1].copy()) == [0x00005678, 0x56780000]


@pytest.mark.parametrize(("decimal", "bits"), [(1.0, 0x3C00), (-8.0, 0xC800), (0.0625, 0x2C00)])
def test_f16_pairs_are_computed_in_both_halves(decimal, bits):
    pair = np.array([bits | bits << 16], np.uint32)
    (result,) = ptx.run("{ fma.rn.f16x2 $0, $1, $2, $1; }", 1, [pair, pair])
    np.testing.assert_array_equal(result.view(np.float16), np.float16(decimal * decimal + decimal))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sub.rn.f16x2 $0, $1, 0x64086408;", "literal"),
        ("mov.b32 $0, t;", "neither a register"),
        ("popc.b32 $0, $1;", "not known"),
    ],
)
def test_what_ptxas_or_the_simulator_do_not_take_is_refused(body, message):
    with pytest.raises(ValueError, match=message):
        run(body, X)
