"""Arithmetic of Triton's interpreter as a GPU does it; `interpreter.py` says what was wrong and installs these."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as ti

Method = Callable[..., Any]


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Values of bf16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Bit patterns of fp32 values rounded to nearest even; every NaN becomes 0x7fff, as PTX says."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _to_odd(y: np.ndarray, error: np.ndarray) -> np.ndarray:
    """`y + error` rounded to the odd neighbour when inexact, so that rounding once more is as good as rounding once."""
    bits: np.ndarray = y.view(np.int64 if y.dtype == np.float64 else np.int32)
    even = bits % 2 == 0
    move = even & (error != 0) & np.isfinite(y) & np.isfinite(error)
    return np.where(move, np.nextafter(y, np.where(error > 0, np.inf, -np.inf).astype(y.dtype)), y)


def _fp64_to_bf16(x: np.ndarray) -> np.ndarray:
    single = x.astype(np.float32)
    return fp32_to_bf16(_to_odd(single, x - single.astype(np.float64)))


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _values(handle: Any) -> np.ndarray:
    return bf16_to_fp32(handle.data) if _is_bf16(handle) else handle.data


def _like(data: np.ndarray, handle: Any) -> Any:
    """`data` as a handle of `handle`'s type, comparisons as int1."""
    if data.dtype == np.bool_:
        return ti.TensorHandle(data, tl.int1)
    return ti.TensorHandle(fp32_to_bf16(data) if _is_bf16(handle) else data, handle.dtype.scalar)


def _on_values(original: Method) -> Method:
    """An elementwise builder method that sees bf16 operands as their values."""

    def method(self: Any, *operands: Any) -> Any:
        *handles, op = operands
        if not _is_bf16(handles[0]):
            return original(self, *operands)
        return _like(op(*(_values(h) for h in handles)), handles[0])

    return method


def _cast(original: Method) -> Method:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        to_bf16 = target.scalar == tl.bfloat16
        if _is_bf16(source) and not to_bf16:
            source = ti.TensorHandle(bf16_to_fp32(source.data), tl.float32)
        if not to_bf16 or _is_bf16(source):
            return original(self, source, target)
        # integers of up to 53 bits are exact in fp64
        return ti.TensorHandle(_fp64_to_bf16(source.data.astype(np.float64)), tl.bfloat16)

    return cast_impl


def _fp_to_fp(original: Method) -> Method:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        nearest = rounding is None or rounding == ti._ir.ROUNDING_MODE.RTNE
        if nearest and target.scalar == tl.bfloat16 and source.dtype.scalar in (tl.float16, tl.float32, tl.float64):
            return self.cast_impl(source, target)
        return original(self, source, target, rounding)

    return create_fp_to_fp


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    kind = z.dtype.scalar
    if kind == tl.float64:
        return ti.TensorHandle(x.data * y.data + z.data, kind)
    product = _values(x).astype(np.float64) * _values(y)  # exact
    addend = _values(z).astype(np.float64)
    total = product + addend
    rest = total - product
    total = _to_odd(total, (product - (total - rest)) + (addend - rest))
    data = _fp64_to_bf16(total) if kind == tl.bfloat16 else total.astype(ti._get_np_dtype(kind))
    return ti.TensorHandle(data, kind)


def _dot(original: Method) -> Method:
    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if _is_bf16(a):
            a, b = (ti.TensorHandle(bf16_to_fp32(x.data), tl.float32) for x in (a, b))
        elif a.dtype.scalar.is_int():
            # exact in fp64, and BLAS; the sum wraps at 32 bits like the GPU's
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int64)
            return ti.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)
        return original(self, a, b, d, precision, imprecise)

    return create_dot


def _clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
    value, low, high = (_values(h) for h in (x, low, high))
    if propagate_nan == ti._ir.PROPAGATE_NAN.ALL:
        return _like(np.clip(value, low, high), x)
    return _like(np.fmin(np.fmax(value, low), high), x)


def _get_bf16(self: Any, value: float) -> Any:
    return ti.TensorHandle(fp32_to_bf16(np.array([value], np.float32)), tl.bfloat16)


def _combine(function: Any, left: list[np.ndarray], right: list[np.ndarray], dtypes: list[Any]) -> list[np.ndarray]:
    """`function` of a reduction or scan, on whole blocks instead of element by element."""
    operands = [
        tl.tensor(ti.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
        for side in (left, right)
        for data, dtype in zip(side, dtypes, strict=True)
    ]
    result = function.fn(*operands)
    result = result if isinstance(result, tuple) else (result,)
    return [ti.interpreter_builder.cast_impl(r.handle, d).data for r, d in zip(result, dtypes, strict=True)]


def generic_reduce(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """Adjacent pairs, like a tree of shuffles; the interpreter's own visits every element in Python."""
    dtypes = [t.dtype for t in tensors]
    data = [t.handle.data.reshape(-1) if self.axis is None else t.handle.data for t in tensors]
    rank, axis = tensors[0].handle.data.ndim, self.axis or 0
    while (n := data[0].shape[axis]) > 1:
        even, odd = ([d.take(range(i, n, 2), axis) for d in data] for i in (0, 1))
        data = _combine(self.combine_fn, even, odd, dtypes)
    if self.keep_dims:
        data = [d.reshape([1] * rank) if self.axis is None else d for d in data]
    else:
        data = [d.squeeze(axis) for d in data]
    return [self.to_tensor(d, dtype) for d, dtype in zip(data, dtypes, strict=True)]


def generic_scan(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """Each element takes in the one 1, 2, 4, ... before it."""
    dtypes, axis = [t.dtype for t in tensors], self.axis
    data = [t.handle.data for t in tensors]
    position = np.arange(data[0].shape[axis]).reshape([-1 if i == axis else 1 for i in range(data[0].ndim)])
    step = 1
    while step < position.size:
        merged = _combine(self.combine_fn, [np.roll(d, step, axis) for d in data], data, dtypes)
        data = [np.where(position < step, d, m) for d, m in zip(data, merged, strict=True)]
        step *= 2
    return [self.to_tensor(d, dtype) for d, dtype in zip(data, dtypes, strict=True)]


def _reduce(original: Method) -> Method:
    skip_nan = {tl.standard._elementwise_max: np.fmax, tl.standard._elementwise_min: np.fmin}

    def apply_impl(self: Any, tensors: tuple[Any, ...]) -> Any:
        if any(_is_bf16(t.handle) for t in tensors):
            return self.generic_reduce(tensors)
        if self.combine_fn in skip_nan:
            return self.min_max(tensors[0], val_reduce_op=skip_nan[self.combine_fn].reduce)
        return original(self, tensors)

    return apply_impl


def _sum_scan(original: Method) -> Method:
    def method(self: Any, tensor: Any) -> Any:
        return self.generic_scan((tensor,)) if _is_bf16(tensor.handle) else original(self, tensor)

    return method


_LIBDEVICE = {
    "rint": np.rint,
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
    "div_rn": np.divide,
}


def _libdevice(function: Callable[..., np.ndarray]) -> Method:
    def call(*operands: Any, _semantic: Any = None) -> Any:
        tensors = [ti.interpreter_semantic.to_tensor(x) for x in operands]
        if len(tensors) == 2:
            tensors = ti.interpreter_semantic.binary_op_type_checking_impl(*tensors)
        data = function(*(t.handle.data for t in tensors)).astype(ti._get_np_dtype(tensors[0].dtype))
        return tl.tensor(ti.TensorHandle(data, tensors[0].dtype), tensors[0].type)

    return call


_SHIFT = re.compile(r"\s*(shl|shr)\.b32\s+\$0,\s*\$1,\s*(\d+);\s*")


def _inline_asm(original: Method) -> Method:
    def create_inline_asm(self: Any, text: str, constraints: str, values: Any, types: Any, pure: Any, pack: Any) -> Any:
        shift = _SHIFT.fullmatch(text)
        if shift is None or pack * values[0].data.itemsize != 4:
            return original(self, text, constraints, values, types, pure, pack)
        # which elements share a word depends on the layout; here neighbours do
        words = np.ascontiguousarray(values[0].data).view(np.uint32)
        words = words << np.uint32(shift[2]) if shift[1] == "shl" else words >> np.uint32(shift[2])
        result = ti.TensorHandle(words.view(values[0].data.dtype), types[0].scalar)
        return SimpleNamespace(get_result=lambda index: result)

    return create_inline_asm


def install() -> None:
    """Give the interpreter these methods."""
    builder = ti.InterpreterBuilder
    methods: dict[str, Method] = {
        "cast_impl": _cast(builder.cast_impl),
        "create_fp_to_fp": _fp_to_fp(builder.create_fp_to_fp),
        "binary_op": _on_values(builder.binary_op),
        "unary_op": _on_values(builder.unary_op),
        "create_fma": _fma,
        "create_dot": _dot(builder.create_dot),
        "create_clampf": _clamp,
        "create_maxnumf": lambda self, a, b: self.binary_op(a, b, np.fmax),
        "create_minnumf": lambda self, a, b: self.binary_op(a, b, np.fmin),
        "get_bf16": _get_bf16,
        "create_inline_asm": _inline_asm(builder.create_inline_asm),
    }
    for name, method in methods.items():
        setattr(builder, name, method)
    ti.ReduceOps.generic_reduce = generic_reduce
    ti.ReduceOps.apply_impl = _reduce(ti.ReduceOps.apply_impl)
    ti.ScanOps.generic_scan = generic_scan
    ti.ScanOps.cumsum = _sum_scan(ti.ScanOps.cumsum)
    ti.ScanOps.cumprod = _sum_scan(ti.ScanOps.cumprod)
    for module in (libdevice, cuda_libdevice):
        for name, function in _LIBDEVICE.items():
            setattr(module, name, _libdevice(function))
