"""Types and tensors of the simulated language; every tensor has a leading axis for the programs that run together."""

from functools import lru_cache

import numpy as np

from glm_gpu.quant import bf16_to_f32, f32_to_bf16


class Type:
    """A number type. Values of 16-bit floats are kept in f32, rounded to the type.

    Attributes:
        name: Triton's.
        memory: NumPy type of its bytes.
        values: NumPy type of its values in a tensor.
        bits: of one value in memory.
        shift: log2 of its bytes.
    """

    def __init__(self, name: str, memory, values=None) -> None:
        self.name = name
        self.memory = np.dtype(memory)
        self.values = np.dtype(values or memory)
        self.bits = 8 * self.memory.itemsize
        self.shift = self.memory.itemsize.bit_length() - 1
        self.is_float = self.values.kind == "f"

    def __repr__(self) -> str:
        return self.name


int1 = Type("int1", np.bool_)
int8, int16, int32, int64 = (Type(f"int{n}", f"i{n // 8}") for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (Type(f"uint{n}", f"u{n // 8}") for n in (8, 16, 32, 64))
float16 = Type("float16", np.float16, np.float32)
bfloat16 = Type("bfloat16", np.uint16, np.float32)
float32 = Type("float32", np.float32)


class PointerType:
    """An address of values of a type."""

    def __init__(self, element_ty: Type) -> None:
        self.element_ty = element_ty


class Divergent(Exception):
    """Programs that run together would take different ways; holds the value that each of them decides by."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__("programs take different ways")
        self.values = values


def rounded(values: np.ndarray, type: Type) -> np.ndarray:
    """Values as the type holds them."""
    if type is float32:
        return values.astype(np.float32, copy=False)
    if type is bfloat16:
        return bf16_to_f32(f32_to_bf16(values))
    if type is float16:
        return values.astype(np.float16).astype(np.float32)
    return values.astype(type.values, copy=False)


def from_bits(bits: np.ndarray, type: Type) -> np.ndarray:
    """Values from their bytes in memory."""
    if type is bfloat16:
        return bf16_to_f32(bits)
    if type is float16:
        return bits.view(np.float16).astype(np.float32)
    return bits.view(type.memory)


def to_bits(values: np.ndarray, type: Type) -> np.ndarray:
    """What memory holds for values."""
    if type is bfloat16:
        return f32_to_bf16(values)
    if type is float16:
        return values.astype(np.float16)
    return np.ascontiguousarray(values)


def promote(a: Type, b: Type) -> Type:
    """Triton's common type of two tensors: floats over integers, wider over narrower, unsigned over signed."""
    if a is b:
        return a
    if a.is_float or b.is_float:
        if not (a.is_float and b.is_float):
            return a if a.is_float else b
        if float32 in (a, b):
            return float32
        return float16 if float16 in (a, b) and bfloat16 not in (a, b) else bfloat16
    if int1 in (a, b):
        return b if a is int1 else a
    if a.bits != b.bits:
        return a if a.bits > b.bits else b
    return a if a.memory.kind == "u" else b


class Tensor:
    """A scalar, block, or block of pointers of each program.

    Attributes:
        data: [1 or programs, *shape]; addresses for pointers.
        dtype: Type or PointerType.
        region: for pointers the memory they may reach, or None for an address from a table.
    """

    __slots__ = ("data", "dtype", "region")
    __array_ufunc__ = None

    def __init__(self, data: np.ndarray, dtype, region=None) -> None:
        self.data, self.dtype, self.region = data, dtype, region

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[1:]

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        assert all(k is None or k == slice(None) for k in key), "only [:, None] and the like"
        return Tensor(self.data[(slice(None), *key)], self.dtype, self.region)

    def to(self, type, bitcast: bool = False):
        """Converted, or with the same bits."""
        if isinstance(type, PointerType):
            assert self.dtype is int64, "a pointer is made from an int64"
            return Tensor(self.data, type, self.region)
        if bitcast:
            assert self.dtype.bits == type.bits, (self.dtype, type)
            return Tensor(from_bits(np.ascontiguousarray(to_bits(self.data, self.dtype)), type), type)
        if type is self.dtype:
            return self
        return Tensor(rounded(self.data, type), type)

    def _single(self):
        """The value, if all programs have the same."""
        assert self.data.ndim == 1, "a block decides nothing"
        if len(self.data) > 1 and (self.data != self.data[0]).any():
            raise Divergent(self.data)
        return self.data[0]

    def __bool__(self) -> bool:
        return bool(self._single())

    def __index__(self) -> int:
        return int(self._single())

    def __neg__(self):
        return Tensor(-self.data, self.dtype)


def aligned(a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The data of two tensors so that NumPy broadcasts them: a scalar gets as many axes as the other's block."""
    x, y = a.data, b.data
    if x.ndim < y.ndim:
        assert x.ndim == 1, (a.shape, b.shape)
        x = x.reshape(-1, *(1,) * (y.ndim - 1))
    elif y.ndim < x.ndim:
        assert y.ndim == 1, (a.shape, b.shape)
        y = y.reshape(-1, *(1,) * (x.ndim - 1))
    return x, y


def tensor(value, like: Type | None = None) -> Tensor:
    """A Python number as a scalar: of the other operand's type where that is the same kind, as in Triton."""
    return value if isinstance(value, Tensor) else _scalar(type(value), value, like)


@lru_cache(maxsize=4096)
def _scalar(kind: type, value, like: Type | None) -> Tensor:
    if kind is bool:
        type = int1 if like is None else like
    elif kind is int:
        type = (int32 if -(2**31) <= value < 2**31 else int64) if like in (None, int1) else like
    else:
        type = like if like is not None and like.is_float else float32
    return Tensor(rounded(np.array([value]), type), type)


def _operator(function, result=None, is_division=False):
    def apply(a, b):
        if isinstance(a.dtype, PointerType):
            return _offset(a, b, function)
        b = tensor(b, a.dtype)
        if isinstance(b.dtype, PointerType):
            return _offset(b, a, function)
        type = promote(a.dtype, b.dtype)
        if is_division and not type.is_float:
            type = float32
        x, y = aligned(a, b)
        if a.dtype is not type:
            x = x.astype(type.values)
        if b.dtype is not type:
            y = y.astype(type.values)
        out = function(x, y)
        return Tensor(out, result) if result else Tensor(rounded(out, type), type)

    return apply


def _reversed(function):
    return lambda a, b: function(tensor(b, int32 if isinstance(a.dtype, PointerType) else a.dtype), a)


def _offset(pointer: Tensor, items, function) -> Tensor:
    items = tensor(items, int32)
    x, y = aligned(pointer, items)
    step = y.astype(np.int64) * (pointer.dtype.element_ty.bits // 8)
    return Tensor(function(x, step), pointer.dtype, pointer.region)


def _quotient(x, y):
    """Rounded towards zero, as integers are divided on a card."""
    quotient = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


_BINARY = {
    "add": _operator(np.add),
    "sub": _operator(np.subtract),
    "mul": _operator(np.multiply),
    "truediv": _operator(np.true_divide, is_division=True),
    "floordiv": _operator(_quotient),
    "mod": _operator(lambda x, y: x - _quotient(x, y) * y),
    "and": _operator(np.bitwise_and),
    "or": _operator(np.bitwise_or),
    "xor": _operator(np.bitwise_xor),
    "lshift": _operator(np.left_shift),
    "rshift": _operator(np.right_shift),
}
_COMPARISONS = {
    name: _operator(function, int1)
    for name, function in {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }.items()
}
for _name, _function in _BINARY.items():
    setattr(Tensor, f"__{_name}__", _function)
    setattr(Tensor, f"__r{_name}__", _reversed(_function))
for _name, _function in _COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _function)
Tensor.__hash__ = object.__hash__
