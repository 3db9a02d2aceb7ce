"""Triton's interpreter, made to compute what a GPU computes and to report what it accesses.

Checked against triton 3.6.0 and 3.7.0, whose interpreter
- holds bf16 as uint16 and computes on the bit patterns: `+ - *`, comparisons, `fma`, `tl.sum`, scans and `tl.dot`
  (https://github.com/triton-lang/triton/issues/11584); a bf16 constant does not exist;
- truncates fp32 to bf16 instead of rounding to nearest even, mangles subnormals, and converts integers and fp64 to
  bf16 by taking the number for the bit pattern;
- rounds twice in `tl.fma`, and lets NaN win in `tl.maximum`, `tl.minimum` and `tl.clamp`, where a GPU drops it;
- keeps float arguments as Python doubles without `.to`, and fails on bool arguments;
- runs `range` loops on Python integers, which do not wrap at 32 bits;
- has no `libdevice`; reduces and scans with other combine functions element by element in Python.

Left as it is: fp8 rounding; `tl.argmax` of NaN (the GPU's answer depends on the reduction order); atomics on bf16 and
inline assembly other than a shift of packed words (both refused); fp32 `tl.dot` as "ieee" whatever `input_precision`
says; `tl.exp2` and the like to the last bit.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as ti

from dmtp_kernels.testing import _interpreted_numbers, watch
from dmtp_kernels.testing.capture import suspended

_installed = False
_launch: watch.Launch | None = None
_patched: set[int] = set()
_names: dict[int, str] = {}


class _Pointer(tl.pointer_type):
    """A pointer type that remembers which launch argument the pointer comes from; arithmetic keeps it."""

    def __init__(self, element_ty: Any, argument: str) -> None:
        super().__init__(element_ty)
        self.argument = argument


def _bitcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_bitcast(self: Any, source: Any, target: Any) -> Any:
        origin = getattr(source.dtype.scalar, "argument", None)
        if origin is not None and target.scalar.is_ptr():
            return ti.TensorHandle(source.data, _Pointer(target.scalar.element_ty, origin))
        return original(self, source, target)

    return create_bitcast


def _reported(original: Callable[..., Any], kind: str, pointers: int, mask: int | None) -> Callable[..., Any]:
    """A memory operation of the builder that reports what it touches first."""

    def method(self: Any, *operands: Any, **keywords: Any) -> Any:
        if _launch is not None and watch.watching():
            pointer = operands[pointers]
            addresses = pointer.data.reshape(-1)
            if mask is not None:
                active = operands[mask]
                active = active.data if isinstance(active, ti.TensorHandle) else active
                addresses = pointer.data[np.broadcast_to(active, pointer.data.shape).astype(bool)]
            _launch.program = self.grid_idx
            size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
            origin = getattr(pointer.dtype.scalar, "argument", None)
            watch.report(watch.Access(_launch, origin, kind, addresses, size))
        return original(self, *operands, **keywords)

    return method


def _set_grid_idx(original: Callable[..., None]) -> Callable[..., None]:
    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        if (x, y, z) == (0, 0, 0):
            self.program_order = watch.program_order(int(np.prod(self.grid_dim)))
        if self.program_order is not None:
            position = self.program_order[(x * self.grid_dim[1] + y) * self.grid_dim[2] + z]
            x, y, z = (int(i) for i in np.unravel_index(position, self.grid_dim))
        original(self, x, y, z)

    return set_grid_idx


def _tensors(name: str, argument: Any) -> dict[str, Any]:
    if isinstance(argument, tuple):
        return {k: t for i, a in enumerate(argument) for k, t in _tensors(f"{name}[{i}]", a).items()}
    argument = getattr(argument, "base", argument)  # of a TensorDescriptor or a TensorWrapper
    return {name: argument} if hasattr(argument, "data_ptr") else {}


def _init_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    def _init_args_hst(self: Any, positional: Any, keywords: Any) -> Any:
        on_host, keywords_on_host = original(self, positional, keywords)
        for name, argument in [*zip(self.arg_names, on_host, strict=False), *keywords_on_host.items()]:
            for key, tensor in _tensors(name, argument).items():
                _names[id(tensor)] = key
                if _launch is not None:
                    _launch.tensors[key] = tensor
        return on_host, keywords_on_host

    return _init_args_hst


def _restore_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    def _restore_args_dev(self: Any, positional: Any, on_host: Any, keywords: Any, keywords_on_host: Any) -> None:
        given = [t for a in (*positional, *keywords.values()) for t in _tensors("", a).values()]
        # CPU tensors were not copied; copying them back would touch every page of a large sparse one
        if any(t.device.type != "cpu" for t in given):
            original(self, positional, on_host, keywords, keywords_on_host)

    return _restore_args_dev


def _convert(original: Callable[..., Any]) -> Callable[..., Any]:
    def _implicit_cvt(argument: Any) -> Any:
        if isinstance(argument, bool):
            return tl.tensor(ti.TensorHandle(np.array([argument]), tl.int1), tl.int1)
        if isinstance(argument, float):
            return tl.tensor(ti.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        converted = original(argument)
        name = _names.get(id(getattr(argument, "base", argument)))
        if name is None or not hasattr(argument, "data_ptr"):
            return converted
        kind = _Pointer(converted.dtype.element_ty, name)
        return tl.tensor(ti.TensorHandle(converted.handle.data, kind), kind)

    return _implicit_cvt


def _typed_range(*bounds: Any, **_: Any) -> Iterator[Any]:
    """`range` of a kernel's loop, whose variable has the width that the compiler gives it."""
    wide = any(isinstance(b, tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    kind = tl.int64 if wide else tl.int32
    for i in range(*(int(b.handle.data.item()) if isinstance(b, tl.tensor) else int(b) for b in bounds)):
        yield tl.tensor(ti.TensorHandle(np.array([i], ti._get_np_dtype(kind)), kind), kind)


def _visit_for(self: Any, node: ast.For) -> ast.AST:
    self.generic_visit(node)
    call = node.iter
    if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "range":
        call.func = ast.Name(id=_typed_range.__name__, ctx=ast.Load())
    return node


def _run_grid(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        global _launch
        given = dict(zip(self.arg_names, arguments, strict=False)) | keywords
        options = {k: given.pop(k) for k in set(given) - set(self.arg_names)}
        _launch = watch.Launch(self.fn.__name__, given, options)
        watch.launched(_launch)
        try:
            with suspended(), np.errstate(all="ignore"):
                return original(self, *arguments, **keywords)
        except ti.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, watch.OutOfBounds):
                cause = cause.__cause__
            raise cause or error from None
        finally:
            _launch = None
            _patched.clear()
            _names.clear()

    return __call__


def _call_device(self: Any, *arguments: Any, **keywords: Any) -> Any:
    # the interpreter patches triton.language at each call of a device function; once a launch is enough
    key = id(self.fn.__globals__)
    if _launch is None or key not in _patched:
        ti._patch_lang(self.fn)
        _patched.add(key)
    return self.rewrite()(*arguments, **keywords)


def install() -> None:
    """Patch the interpreter of this process; a second call does nothing.

    Raises:
        RuntimeError: TRITON_INTERPRET was not 1 when triton was imported, so kernels are compiled, not interpreted.
    """
    global _installed
    if not isinstance(tl.sum, ti.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET must be 1 before triton is imported")
    if _installed:
        return
    _installed = True
    _interpreted_numbers.install()
    builder = ti.InterpreterBuilder
    builder.create_bitcast = _bitcast(builder.create_bitcast)
    builder.create_masked_load = _reported(builder.create_masked_load, "load", 0, 1)
    builder.create_masked_store = _reported(builder.create_masked_store, "store", 0, 2)
    builder.create_atomic_rmw = _reported(builder.create_atomic_rmw, "atomic", 1, 3)
    builder.create_atomic_cas = _reported(builder.create_atomic_cas, "atomic", 0, None)
    builder.set_grid_idx = _set_grid_idx(builder.set_grid_idx)
    # it asserts only with `debug`, and costs half of the run time without
    object.__setattr__(ti.interpreter_builder.options, "sanitize_overflow", False)
    # the rewriter puts the names of its module into the kernel's
    ti._typed_range = _typed_range
    ti.ASTTransformer.visit_For = _visit_for
    ti._implicit_cvt = _convert(ti._implicit_cvt)
    ti.GridExecutor._init_args_hst = _init_arguments(ti.GridExecutor._init_args_hst)
    ti.GridExecutor._restore_args_dev = _restore_arguments(ti.GridExecutor._restore_args_dev)
    ti.GridExecutor.__call__ = _run_grid(ti.GridExecutor.__call__)
    ti.InterpretedFunction.__call__ = _call_device
