"""The part of Triton's language that the kernels use, on NumPy, for many programs at once.

A kernel's Python source is run as it stands, with this module in the place of `triton.language`. Each operation works
on all programs together; where they would take different ways (Divergent), the launch runs them again in groups.
Sums of floats are halving trees and products of blocks are summed in f64 and rounded once, so a value's bits depend on
nothing around it.
"""

import builtins
import threading
from dataclasses import dataclass, field

import numpy as np

from glm_gpu.kernels.simulator import ptx
from glm_gpu.kernels.simulator.memory import Memory
from glm_gpu.kernels.simulator.values import (
    PointerType,
    Tensor,
    Type,
    aligned,
    bfloat16,
    float16,
    float32,
    from_bits,
    int1,
    int8,
    int16,
    int32,
    int64,
    promote,
    tensor,
    uint8,
    uint16,
    uint32,
    uint64,
)

__all__ = ["bfloat16", "float16", "float32", "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
__all__ += ["uint64"]

constexpr = object
pointer_type = PointerType
static_range = builtins.range


@dataclass
class Run:
    """Programs that run together.

    Attributes:
        grid: programs of the launch along each axis.
        ids: [programs, 3], their places in it.
        numbers: [programs], one number for each.
        memory: of the launch.
        is_checked: whether to look for faults that cost time to find.
    """

    grid: tuple[int, int, int]
    ids: np.ndarray
    memory: Memory
    is_checked: bool
    numbers: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = (self.ids[:, 0] * self.grid[1] + self.ids[:, 1]) * self.grid[2] + self.ids[:, 2]


current = threading.local()


def program_id(axis: int) -> Tensor:
    ids = current.run.ids[:, axis].astype(np.int32)
    return Tensor(ids[:1] if current.run.grid[axis] == 1 else ids, int32)


def num_programs(axis: int) -> Tensor:
    return Tensor(np.array([current.run.grid[axis]], np.int32), int32)


def arange(start: int, end: int) -> Tensor:
    assert (end - start) & (end - start - 1) == 0, "a block's size is a power of two"
    return Tensor(np.arange(start, end, dtype=np.int32)[None], int32)


def full(shape, value, type: Type) -> Tensor:
    assert all(size & (size - 1) == 0 for size in shape), shape
    return Tensor(np.full((1, *shape), value, type.values), type)


def zeros(shape, type: Type) -> Tensor:
    return full(shape, 0, type)


def cdiv(a, b):
    return (a + (b - 1)) // b


def range(start, end=None, step=1, loop_unroll_factor=None, num_stages=None):
    if end is None:
        start, end = 0, start
    place = int(start)
    while place < int(end):
        yield place
        place += int(step)


def load(pointer: Tensor, mask=None, other=None) -> Tensor:
    mask = None if mask is None else aligned(mask, pointer)[0]
    other = None if other is None else tensor(other, pointer.dtype.element_ty)
    return current.run.memory.load(pointer, mask, other, current.run.numbers)


def store(pointer: Tensor, value, mask=None) -> None:
    mask = None if mask is None else aligned(mask, pointer)[0]
    value = tensor(value, pointer.dtype.element_ty).to(pointer.dtype.element_ty)
    value = Tensor(aligned(value, pointer)[0], value.dtype)
    current.run.memory.store(pointer, value, mask, current.run.numbers)


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision=None) -> Tensor:
    assert a.dtype is b.dtype, f"products of {a.dtype} with {b.dtype}"
    assert builtins.min(*a.shape, *b.shape) >= 16, f"tensor cores want at least 16: {a.shape} @ {b.shape}"
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    if acc is not None:
        product += acc.data
    return Tensor(product.astype(np.float32), float32)


def trans(x: Tensor) -> Tensor:
    return Tensor(np.swapaxes(x.data, -1, -2), x.dtype)


def reshape(x: Tensor, shape) -> Tensor:
    return Tensor(x.data.reshape(len(x.data), *shape), x.dtype)


def where(condition, a, b) -> Tensor:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a = tensor(a, b.dtype if isinstance(b, Tensor) else None)
        b = tensor(b, a.dtype)
    else:
        a, b = tensor(a), tensor(b)
    type = promote(a.dtype, b.dtype)
    x, y = aligned(a.to(type), b.to(type))
    chosen, _ = aligned(condition, a if a.data.ndim >= b.data.ndim else b)
    x, _ = aligned(Tensor(x, type), condition)
    y, _ = aligned(Tensor(y, type), condition)
    return Tensor(np.where(chosen, x, y), type)


def _pair(function):
    def apply(a, b):
        a = tensor(a, b.dtype if isinstance(b, Tensor) else None)
        b = tensor(b, a.dtype)
        type = promote(a.dtype, b.dtype)
        return Tensor(function(*aligned(a.to(type), b.to(type))), type)

    return apply


# Of a number and NaN the number, as on a card.
minimum = _pair(np.fmin)
maximum = _pair(np.fmax)


def sum(x: Tensor, axis: int) -> Tensor:
    values = np.moveaxis(x.data, axis + 1, -1)
    if not x.dtype.is_float:
        return Tensor(values.sum(-1, dtype=np.int32 if x.dtype.bits < 32 else x.dtype.values), x.dtype)
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return Tensor(values[..., 0], x.dtype)


def max(x: Tensor, axis: int) -> Tensor:
    return Tensor(np.fmax.reduce(x.data, axis + 1), x.dtype)


def min(x: Tensor, axis: int) -> Tensor:
    return Tensor(np.fmin.reduce(x.data, axis + 1), x.dtype)


def cumsum(x: Tensor, axis: int) -> Tensor:
    assert not x.dtype.is_float, "the order of a running sum of floats is not known here"
    return Tensor(np.cumsum(x.data, axis + 1, dtype=x.data.dtype), x.dtype)


def histogram(x: Tensor, num_bins: int, mask: Tensor) -> Tensor:
    programs = builtins.max(len(x.data), len(mask.data))
    values = np.broadcast_to(x.data, (programs, *x.shape))
    keep = np.broadcast_to(mask.data, values.shape)
    places = (values + num_bins * np.arange(programs)[:, None])[keep]
    return Tensor(np.bincount(places, minlength=programs * num_bins).reshape(programs, -1).astype(np.int32), int32)


def exp(x: Tensor) -> Tensor:
    return Tensor(np.exp(x.data.astype(np.float64)).astype(np.float32), float32)


def sqrt(x: Tensor) -> Tensor:
    return Tensor(np.sqrt(x.data), x.dtype)


def multiple_of(x: Tensor, value: int) -> Tensor:
    """A promise to the compiler, which is kept here or the launch fails."""
    assert not (x.data % value).any(), f"an address is promised to be a multiple of {value}, and is not"
    return x


_tables: dict[str, list[np.ndarray]] = {}


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack) -> tuple[Tensor, ...]:
    assert is_pure, constraints
    inputs = [np.ascontiguousarray(x.data) for x in args]
    bits = [type.bits for type in dtype]
    if current.run.is_checked:
        order = np.random.default_rng(inputs[0].size).permutation(inputs[0].size)
        outputs = ptx.elementwise(asm, inputs, bits, pack, order)
    elif len(inputs) == 1 and inputs[0].dtype == np.uint16:
        # what it does to each of the 65,536 words is worked out once
        if asm not in _tables:
            outputs = ptx.elementwise(asm, [np.arange(1 << 16).astype(np.uint16)], bits, pack)
            _tables[asm] = [from_bits(out, type) for out, type in zip(outputs, dtype, strict=True)]
        return tuple(Tensor(table[inputs[0]], type) for table, type in zip(_tables[asm], dtype, strict=True))
    else:
        outputs = ptx.elementwise(asm, inputs, bits, pack)
    return tuple(Tensor(from_bits(out, type), type) for out, type in zip(outputs, dtype, strict=True))
