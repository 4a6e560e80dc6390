"""Triton's own interpreter as a launcher on this process's memory: a second opinion on the simulator.

Needs TRITON_INTERPRET=1 before Triton is imported. Triton's interpreter computes bf16 on its bit patterns and knows no
inline assembly; both are put right here, the latter with the simulator's own emulation. It finds no race, and reads out
of bounds what it happens to find, so it is no substitute.
"""

import importlib
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from glm_gpu.kernels.gpu.arrays import Kernel
from glm_gpu.kernels.simulator import ptx
from glm_gpu.quant import bf16_to_f32, f32_to_bf16

_TYPES = {
    "f32": tl.float32,
    "bf16": tl.bfloat16,
    "f16": tl.float16,
    "u8": tl.uint8,
    "u16": tl.uint16,
    "u32": tl.uint32,
    "u64": tl.uint64,
    "i32": tl.int32,
    "i64": tl.int64,
}
_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle


class _Pointer:
    """What the interpreter asks of a torch tensor; memory is the host's already, so that nothing is copied."""

    def __init__(self, address: int, dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self):
        return self._address

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return ()

    stride = size

    def set_(self, *_):
        pass

    copy_ = set_


class TritonInterpreter:
    """Launches kernels in Triton's interpreter."""

    def launch(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        if 0 in grid:
            return
        module = importlib.import_module(f"glm_gpu.kernels.gpu.source.{kernel.module}")
        with np.errstate(all="ignore"):
            getattr(module, kernel.name)[grid](**{n: _argument(a) for n, a in arguments.items()}, **constants)


def _argument(value):
    if value is None:
        return _Pointer(0, tl.float32)
    if isinstance(value, int | float | np.integer):
        return value.item() if isinstance(value, np.integer) else value
    return _Pointer(value.ptr, _TYPES[value.dtype])


def _is_bf16(handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _wide(handle):
    return bf16_to_f32(handle.data) if _is_bf16(handle) else handle.data.astype(np.float32)


def _patch_bf16() -> None:
    binary_op, unary_op, cast_impl, dot = (
        _Builder.binary_op,
        _Builder.unary_op,
        _Builder.cast_impl,
        _Builder.create_dot,
    )
    fp_to_fp = _Builder.create_fp_to_fp

    def patched_binary(self, lhs, rhs, op):
        if not _is_bf16(lhs):
            return binary_op(self, lhs, rhs, op)
        out = op(_wide(lhs), _wide(rhs))
        return _Handle(out, tl.int1) if out.dtype == np.bool_ else _Handle(f32_to_bf16(out), tl.bfloat16)

    def patched_unary(self, arg, op):
        return _Handle(f32_to_bf16(op(_wide(arg))), tl.bfloat16) if _is_bf16(arg) else unary_op(self, arg, op)

    def patched_cast(self, src, dst_type):
        target = dst_type.scalar
        if _is_bf16(src) == (target == tl.bfloat16):
            return cast_impl(self, src, dst_type)
        if target == tl.bfloat16:
            return _Handle(f32_to_bf16(src.data.astype(np.float32)), tl.bfloat16)
        return _Handle(_wide(src).astype(interpreter._get_np_dtype(target)), target)

    def patched_fp_to_fp(self, src, dst_type, rounding_mode):
        if _is_bf16(src) or dst_type.scalar == tl.bfloat16:
            return patched_cast(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def patched_dot(self, a, b, d, *options):
        if not _is_bf16(a) and a.data.dtype != np.float16:
            return dot(self, a, b, d, *options)
        return _Handle(np.matmul(_wide(a), _wide(b)) + d.data, d.dtype.scalar)

    _Builder.binary_op, _Builder.unary_op = patched_binary, patched_unary
    _Builder.cast_impl, _Builder.create_fp_to_fp = patched_cast, patched_fp_to_fp
    _Builder.create_dot = patched_dot
    _Builder.get_bf16 = lambda self, value: _Handle(f32_to_bf16(np.array([value], np.float32)), tl.bfloat16)


class _Results:
    def __init__(self, handles) -> None:
        self._handles = handles

    def get_result(self, index: int):
        return self._handles[index]


def _inline_asm(self, asm, constraints, values, types, is_pure, pack):
    inputs = [np.ascontiguousarray(value.data) for value in values]
    bits = [type.scalar.primitive_bitwidth for type in types]
    outputs = ptx.elementwise(asm, inputs, bits, pack)
    return _Results(
        [
            _Handle(out.view(interpreter._get_np_dtype(type.scalar)), type.scalar)
            for out, type in zip(outputs, types, strict=True)
        ]
    )


_patch_bf16()
_Builder.create_inline_asm = _inline_asm
