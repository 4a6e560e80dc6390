"""The inline assembly of the kernels, instruction by instruction, on NumPy.

Only what the kernels use is known; anything else is refused, and so is what ptxas refuses: literals where an
instruction takes registers only, registers that were not set.
"""

import re
from functools import lru_cache

import numpy as np

from glm_gpu.quant import bf16_to_f32, f32_to_bf16

_LITERAL = re.compile(r"(0x[0-9a-fA-F]+|\d+)$")
_U32 = np.uint32


@lru_cache
def parse(text: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """The instructions of a block in braces: (operation, destination, sources)."""
    body = text.strip()
    assert body[0] == "{" and body[-1] == "}", "inline assembly needs a scope of its own"
    instructions = []
    for statement in body[1:-1].split(";"):
        words = statement.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        destination, *sources = (operand.strip() for operand in words[1].split(","))
        instructions.append((words[0], destination, tuple(sources)))
    return tuple(instructions)


def run(text: str, num_outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Registers $0 .. $(num_outputs - 1) after the block, given the ones that follow them.

    Args:
        inputs: [n] uint32 each.

    Returns:
        [n] uint32 each.
    """
    registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}
    for operation, destination, sources in parse(text):
        takes_literals = "x2" not in operation
        values = []
        for source in sources:
            if source in registers:
                values.append(registers[source])
            elif _LITERAL.match(source) and takes_literals:
                values.append(_U32(int(source, 0)))
            else:
                raise ValueError(f"{operation}: {source} is neither a register that was set nor a literal taken here")
        if operation not in _OPERATIONS:
            raise ValueError(f"{operation} is not known here")
        registers[destination] = np.asarray(_OPERATIONS[operation](*values), _U32)
    return [np.broadcast_to(registers[f"${i}"], inputs[0].shape) for i in range(num_outputs)]


def _lop3(a, b, c, table):
    result = _U32(0)
    for row in range(8):
        if int(table) >> row & 1:
            result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _prmt(a, b, selector):
    octets = [value >> _U32(8 * i) & _U32(255) for value in (a, b) for i in range(4)]
    result = _U32(0)
    for i in range(4):
        choice = int(selector) >> 4 * i & 15
        assert choice < 8, "prmt with sign replication is not known here"
        result = result | octets[choice] << _U32(8 * i)
    return result


def _halves(function, decode, encode):
    """An operation on both 16-bit halves of registers, rounded once: f64 holds every product and sum exactly."""

    def apply(*values):
        result = _U32(0)
        for shift in (_U32(0), _U32(16)):
            wide = [decode((value >> shift & _U32(0xFFFF)).astype(np.uint16)).astype(np.float64) for value in values]
            result = result | encode(function(*wide)).astype(_U32) << shift
        return result

    return apply


def _f16x2(function):
    return _halves(function, lambda bits: bits.view(np.float16), lambda wide: wide.astype(np.float16).view(np.uint16))


def _bf16x2(function):
    return _halves(function, bf16_to_f32, lambda wide: f32_to_bf16(wide.astype(np.float32)))


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, count: a >> count,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "sub.rn.f16x2": _f16x2(lambda a, b: a - b),
    "fma.rn.f16x2": _f16x2(lambda a, b, c: a * b + c),
    "fma.rn.bf16x2": _bf16x2(lambda a, b, c: a * b + c),
}


def elementwise(text: str, inputs: list[np.ndarray], output_bits: list[int], pack: int, order=None) -> list[np.ndarray]:
    """An elementwise block on arrays of one shape, `pack` elements at a time.

    Args:
        inputs: arrays of 16- or 32-bit unsigned integers.
        output_bits: 16 or 32 for each output.
        pack: elements that share registers.
        order: a permutation of the elements, by which they are packed; a block that moves anything between elements
            then gives wrong results, as it could on a card, where the layout decides who shares a register.

    Returns:
        One array of unsigned integers for each output.
    """
    shape, size = inputs[0].shape, inputs[0].size
    assert size % pack == 0, (shape, pack)
    registers = []
    for array in inputs:
        flat = np.ascontiguousarray(array).reshape(-1)
        flat = flat if order is None else flat[order]
        assert flat.itemsize * pack % 4 == 0, (array.dtype, pack)
        registers += list(np.ascontiguousarray(flat.view(_U32).reshape(size // pack, -1).T))
    counts = [bits * pack // 32 for bits in output_bits]
    results = run(text, sum(counts), registers)
    outputs = []
    for bits, count in zip(output_bits, counts, strict=True):
        mine, results = results[:count], results[count:]
        flat = np.ascontiguousarray(np.stack(mine, 1)).view(np.uint16 if bits == 16 else _U32).reshape(-1)
        if order is not None:
            scattered = np.empty_like(flat)
            scattered[order] = flat
            flat = scattered
        outputs.append(flat.reshape(shape))
    return outputs
