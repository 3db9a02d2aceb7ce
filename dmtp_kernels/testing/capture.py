"""A round that can be captured into a CUDA graph, checked on any machine.

What breaks a capture or freezes a value into it raises here, on CPU tensors too: reading a tensor from the host, shapes
that depend on data, copies between host and device, and, where asked, allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}
_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__complex__")
_COPIES = ("cpu", "cuda", "pin_memory", "new_tensor")
_FROM_HOST = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer")
_WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))

_suspended: ContextVar[bool] = ContextVar("suspended", default=False)


class CaptureError(RuntimeError):
    """Something inside `capture_safe` could not be captured into a CUDA graph."""


@contextmanager
def suspended() -> Iterator[None]:
    """Look away: for code that stands in for a kernel launch."""
    token = _suspended.set(True)
    try:
        with _disable_current_modes():
            yield
    finally:
        _suspended.reset(token)


class _CaptureMode(TorchDispatchMode):
    def __init__(self, allocations: bool, numpy: bool) -> None:
        super().__init__()
        self.allocations = allocations
        self.numpy = numpy
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        kwargs = kwargs or {}
        if func.overloadpacket in _INDEXED:
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                raise CaptureError(f"{func}: the shape of a mask as index depends on data; use where or masked_fill")
        elif _DATA_DEPENDENT & set(func.tags):
            raise CaptureError(f"{func}: its result or its shape depends on data, so the host waits for the device")
        # a single value travels as an argument of the kernel that uses it
        lifted = func.overloadpacket is torch.ops.aten.lift_fresh
        if lifted and args[0].dim() > 0 and not self.numpy:
            raise CaptureError(f"{func}: a tensor made from Python values is a copy from the host")
        devices = {t.device.type for t in _tensors([*args, *kwargs.values()]) if t.dim() > 0 or t.is_cuda}
        if (target := kwargs.get("device")) is not None and devices:
            devices.add(torch.device(target).type)
        if {"cpu", "cuda"} <= devices:
            raise CaptureError(f"{func}: copies between host and device")
        if not self.allocations and func.namespace == "aten" and _allocates(func) and not lifted:
            raise CaptureError(f"{func}: allocates")
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = _device_key(args, kwargs)
        if func.namespace in ("aten", "prim", "prims") or not func.has_kernel_for_dispatch_key(key):
            return func(*args, **kwargs)
        # an op written in Python: stay on while its own calls run
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _device_key(args: Any, kwargs: Any) -> torch._C.DispatchKey:
    cuda = any(t.is_cuda for t in _tensors([*args, *kwargs.values()]))
    return torch._C.DispatchKey.CUDA if cuda else torch._C.DispatchKey.CPU


def _allocates(func: Any) -> bool:
    """Whether an op returns memory that is none of its arguments'."""
    return any("Tensor" in str(r.type) and r.alias_info is None for r in func._schema.returns)


def _refusing(owner: Any, name: str, why: str) -> Any:
    original = getattr(owner, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        if _suspended.get():
            return original(*args, **kwargs)
        raise CaptureError(f"{getattr(owner, '__name__', owner)}.{name}: {why}")

    return mock.patch.object(owner, name, refused)


def _moving(original: Callable[..., Any]) -> Any:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = [a for a in (*args, kwargs.get("device")) if isinstance(a, str | torch.device | int)]
        for device in named:
            kind = "cuda" if isinstance(device, int) else torch.device(device).type
            # a literal "cpu" is a copy wherever the tensors are on a device
            if not _suspended.get() and (kind != self.device.type or device == "cpu"):
                raise CaptureError(f"Tensor.to({device!r}): copies between host and device")
        return original(self, *args, **kwargs)

    return mock.patch.object(torch.Tensor, "to", to)


@contextmanager
def capture_safe(*, allocations: bool = True, numpy: bool = False) -> Iterator[_CaptureMode]:
    """Raise `CaptureError` at the first thing inside that a CUDA graph cannot hold.

    Refused: `.item()`, `.tolist()`, `.numpy()`, `if tensor`, `print(tensor)` and other reads from the host; `nonzero`,
    boolean-mask indexing and other shapes that depend on data; `torch.tensor` of Python values, `.cpu()`, `.cuda()`,
    `.to("cpu")` and other copies between host and device; `torch.cuda.synchronize`.

    Code inside `dmtp` ops and other custom ops written in Python is watched; kernel launches, in C++ or Triton, are not
    (interpreted Triton kernels need `testing.interpreter.install()`). The `calls` of the yielded object counts what was
    seen, so that a test can tell watched from invisible. Reads are refused in all threads.

    Args:
        allocations: False refuses every new tensor too, as the `_out` forms promise after their first call; views pass.
        numpy: True lets `.numpy()` and `torch.from_numpy` pass. Only CPU tensors have them, so what calls them is a
            branch for CPU tensors.

    Raises:
        CaptureError: naming the call.
    """
    mode = _CaptureMode(allocations, numpy)
    with ExitStack() as stack:
        allowed = {"numpy", "from_numpy"} if numpy else set()
        for name in set(_READS) - allowed:
            stack.enter_context(_refusing(torch.Tensor, name, "reads the device from the host"))
        for name in _COPIES:
            stack.enter_context(_refusing(torch.Tensor, name, "copies between host and device"))
        for name in set(_FROM_HOST) - allowed:
            stack.enter_context(_refusing(torch, name, "a tensor made from host data is a copy from the host"))
        for owner, name in _WAITS:
            stack.enter_context(_refusing(owner, name, "waits for the device"))
        stack.enter_context(_moving(torch.Tensor.to))
        stack.enter_context(mode)
        yield mode
