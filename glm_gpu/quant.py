"""Format and QuantizedMatrix: the byte contract of packed weights; quantize, unpack, dequantize.

Bytes of a packed matrix [O, I], row after row, each row `Format.row_bytes(I)` long:
    int8   one byte a column, two's complement
    int4   column 2j in the low nibble, 2j+1 in the high nibble, stored as value + 8;
           odd I: the unused last high nibble is written as 8 and ignored when read
    int2   column 4j in the lowest two bits, 4j+3 in the highest, stored as value + 2;
           unused fields are written as 2 and ignored when read
Scales lie apart: [O, ceil(I / group)], one for each row and `group` consecutive columns (the last group may be short);
without a group, one for each row.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# quantize and dequantize touch about this many weights at a time, so that their temporaries stay in the cache
_BLOCK_WEIGHTS = 1 << 19
_MIN_SCALE = np.float32(1e-8)
# 1e-8 is zero in f16; its smallest positive value is the floor there
_MIN_SCALE_F16 = np.float16(2.0**-24)
_ONE, _SIXTEEN, _JUST_BELOW_HALF = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)


@dataclass(frozen=True)
class Format:
    """How one matrix is stored: its bits a weight and, if packed, how many columns share a scale.

    Attributes:
        name: as in manifests and messages.
        bits: 32 or 16 (plain numbers), 8, 4 or 2 (packed integers with scales).
        group: columns that share a scale; None when a whole row does, or when there are no scales.
    """

    name: str
    bits: int
    group: int | None = None

    @classmethod
    def parse(cls, name: str) -> "Format":
        """The format of that name.

        Raises:
            ValueError: no such format; the message lists those there are.
        """
        if name not in FORMATS:
            raise ValueError(f"format {name!r} is not known; expected one of {', '.join(FORMATS)}")
        return FORMATS[name]

    @property
    def is_packed(self) -> bool:
        """Whether weights are integers with scales, rather than plain numbers."""
        return self.bits <= 8

    @property
    def qmax(self) -> int:
        """The largest integer of a packed format: 127, 7 or 1."""
        return (1 << (self.bits - 1)) - 1

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of one row."""
        return -(-num_columns * self.bits // 8)

    def num_groups(self, num_columns: int) -> int:
        """Scales of one row; 0 for plain numbers."""
        if not self.is_packed:
            return 0
        return 1 if self.group is None else -(-num_columns // self.group)

    def data_nbytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes of all rows, without scales."""
        return num_rows * self.row_bytes(num_columns)

    def scale_count(self, num_rows: int, num_columns: int) -> int:
        """Number of scales of all rows."""
        return num_rows * self.num_groups(num_columns)


FORMATS = {
    format.name: format
    for format in (
        Format("f32", 32),
        Format("bf16", 16),
        Format("int8", 8),
        Format("int4", 4),
        Format("int2", 2),
        Format("int4_g64", 4, 64),
        Format("int4_g128", 4, 128),
    )
}


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A weight [O, I] in its stored form; arrays may be views of a slab and are never written.

    Attributes:
        format: how `data` is to be read.
        shape: (O, I).
        data: packed: uint8 [O, row_bytes]; "f32": float32 [O, I]; "bf16": uint16 [O, I], bit patterns. C-contiguous.
        scales: float32 or float16 [O, num_groups]; None for plain numbers.
    """

    format: Format
    shape: tuple[int, int]
    data: np.ndarray
    scales: np.ndarray | None = None

    def __post_init__(self):
        num_rows, num_columns = self.shape
        if self.format.is_packed:
            assert self.data.dtype == np.uint8, self.data.dtype
            assert self.data.shape == (num_rows, self.format.row_bytes(num_columns)), (self.data.shape, self.shape)
            assert self.scales is not None
            assert self.scales.dtype in (np.float32, np.float16), self.scales.dtype
            assert self.scales.shape == (num_rows, self.format.num_groups(num_columns)), (self.scales.shape, self.shape)
        else:
            assert self.data.dtype == PLAIN_DTYPES[self.format.name], self.data.dtype
            assert self.data.shape == self.shape, (self.data.shape, self.shape)
            assert self.scales is None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @cached_property
    def arguments(self) -> tuple:
        """As C functions take a matrix: bits, group (0 for none), data, scales."""
        return self.format.bits, self.format.group or 0, self.data, self.scales

    def rows(self, start: int, stop: int) -> "QuantizedMatrix":
        """Rows start..stop-1 as a view; never copies."""
        data = self.data[start:stop]
        scales = None if self.scales is None else self.scales[start:stop]
        return QuantizedMatrix(self.format, (len(data), self.shape[1]), data, scales)


PLAIN_DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16)}


def quantize(weight: np.ndarray, format: Format, scale_dtype=np.float32) -> QuantizedMatrix:
    """A weight in the given format; the scale of a group is its largest magnitude over qmax.

    In f32 arithmetic: scale = max(absmax / qmax, 1e-8), q = clip(rint(w / scale), -qmax - 1, qmax), ties to even.
    With float16 scales the rounded scale (at least 2^-24) is the divisor.

    Args:
        weight: [O, I] f32, finite.
        format: what to make of it; "f32" shares the caller's memory where it can.
        scale_dtype: float32 or float16.

    Raises:
        ValueError: a weight is not finite, or a scale is too large for float16; the message holds the index.

    Source: DESIGN section 4; for rows the packing of the founding article.
    """
    weight = np.asarray(weight, np.float32)
    num_rows, num_columns = weight.shape
    if not format.is_packed:
        data = np.ascontiguousarray(weight) if format.name == "f32" else f32_to_bf16(weight)
        return QuantizedMatrix(format, (num_rows, num_columns), data)
    data = np.empty((num_rows, format.row_bytes(num_columns)), np.uint8)
    scales = np.empty((num_rows, format.num_groups(num_columns)), scale_dtype)
    for start, stop in _row_blocks(num_rows, num_columns):
        block = _pad_to_groups(weight[start:stop], format)
        scales[start:stop] = _scales(block, format, scales.dtype, start)
        block /= scales[start:stop, :, None].astype(np.float32, copy=False)
        np.rint(block, out=block)
        np.clip(block, -format.qmax - 1, format.qmax, out=block)
        integers = block.reshape(stop - start, -1)[:, :num_columns].astype(np.int8)
        data[start:stop] = pack(integers, format)
    return QuantizedMatrix(format, (num_rows, num_columns), data, scales)


def unpack(matrix: QuantizedMatrix) -> np.ndarray:
    """The integers of a packed matrix, before scaling: int8 [O, I]."""
    assert matrix.format.is_packed, matrix.format.name
    num_columns = matrix.shape[1]
    if matrix.format.bits == 8:
        return matrix.data.view(np.int8).copy()
    per_byte = 8 // matrix.format.bits
    mask = np.uint8((1 << matrix.format.bits) - 1)
    fields = np.empty((*matrix.data.shape, per_byte), np.int8)
    for field in range(per_byte):
        fields[..., field] = (matrix.data >> np.uint8(field * matrix.format.bits)) & mask
    fields -= np.int8(matrix.format.qmax + 1)
    return np.ascontiguousarray(fields.reshape(len(matrix.data), -1)[:, :num_columns])


def dequantize(matrix: QuantizedMatrix) -> np.ndarray:
    """The weights a matrix stands for: f32 [O, I], each the f32 product of integer and scale. Always a copy."""
    if matrix.format.name == "f32":
        return matrix.data.copy()
    if matrix.format.name == "bf16":
        return bf16_to_f32(matrix.data)
    num_rows, num_columns = matrix.shape
    group = matrix.format.group or max(num_columns, 1)
    result = np.empty(matrix.shape, np.float32)
    for start, stop in _row_blocks(num_rows, num_columns):
        block = matrix.rows(start, stop)
        result[start:stop] = unpack(block)
        scales = np.asarray(block.scales, np.float32)
        result[start:stop] *= np.repeat(scales, group, axis=1)[:, :num_columns]
    return result


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Bit patterns of the nearest bf16 values, ties to even: uint16, same shape. NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = bits >> _SIXTEEN
    rounded &= _ONE  # to even: what lies half way goes up where the last bit kept is odd
    rounded += _JUST_BELOW_HALF
    rounded += bits
    rounded >>= _SIXTEEN
    result = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():  # the rounding above could carry a NaN into infinity
        result[is_nan] = (bits[is_nan] >> _SIXTEEN).astype(np.uint16) | np.uint16(0x40)
    return result


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """The f32 values of bf16 bit patterns (exact): same shape."""
    result = np.asarray(bits, np.uint16).astype(np.uint32)
    result <<= np.uint32(16)
    return result.view(np.float32)


def _row_blocks(num_rows: int, num_columns: int):
    step = max(1, _BLOCK_WEIGHTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _pad_to_groups(rows: np.ndarray, format: Format) -> np.ndarray:
    """A copy of the rows as [rows, groups, columns of a group], the last group filled up with zeros."""
    num_rows, num_columns = rows.shape
    groups = format.num_groups(num_columns)
    group = format.group or num_columns
    padded = np.zeros((num_rows, groups * group), np.float32)
    padded[:, :num_columns] = rows
    return padded.reshape(num_rows, groups, group)


def _scales(block: np.ndarray, format: Format, scale_dtype: np.dtype, first_row: int) -> np.ndarray:
    largest = np.maximum(block.max(axis=2, initial=0.0), -block.min(axis=2, initial=0.0))  # NaN stays NaN
    if not np.isfinite(largest).all():
        row, group, column = np.argwhere(~np.isfinite(block))[0]
        raise ValueError(
            f"weight [{first_row + row}, {group * block.shape[2] + column}] is {block[row, group, column]}, "
            "expected a finite number"
        )
    scales = np.maximum(largest / np.float32(format.qmax), _MIN_SCALE)
    if scale_dtype == np.float32:
        return scales
    with np.errstate(over="ignore"):
        rounded = np.maximum(scales.astype(np.float16), _MIN_SCALE_F16)
    if not np.isfinite(rounded).all():
        row, group = np.argwhere(~np.isfinite(rounded))[0]
        raise ValueError(
            f"scale [{first_row + row}, {group}] is {scales[row, group]:g}, expected at most 65504 for float16; "
            "use float32 scales"
        )
    return rounded


def pack(integers: np.ndarray, format: Format) -> np.ndarray:
    """int8 [rows, I] as bytes: uint8 [rows, row_bytes]."""
    if format.bits == 8:
        return integers.view(np.uint8)
    num_rows, num_columns = integers.shape
    per_byte = 8 // format.bits
    fields = np.full((num_rows, format.row_bytes(num_columns) * per_byte), format.qmax + 1, np.uint8)
    fields[:, :num_columns] += integers.view(np.uint8)  # modulo 256: value + 8 or value + 2
    fields = fields.reshape(num_rows, -1, per_byte)
    packed = fields[..., 0].copy()
    for field in range(1, per_byte):
        packed |= fields[..., field] << np.uint8(field * format.bits)
    return packed
