"""Whether an op takes a call, asked without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from dmtp_kernels import _library, backends
from dmtp_kernels._library import Op, device_of, refused, registered

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PYTHON_FORMS: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {}


def supports(name: str, *inputs: Any, **keywords: Any) -> str | None:
    """Why op `name` cannot take these inputs, or None when it can.

    The arguments are those of `torch.ops.dmtp.<name>`, by position or by keyword; with an `LMHead`, a `Fusion` or a
    scale as a number among them, those of the op's Python function.
    """
    op = _library._OPS.get(name)
    if op is None:
        if name.removesuffix("_out") in _library._OPS:
            return f"{name}: ask for {name.removesuffix('_out')!r}, whose inputs it takes"
        return f"no op named {name!r}; known: {', '.join(registered())}"
    try:
        values = _taken(op, *_unpacked(op, inputs, keywords))
        op.check(*values)
        return backends.refusal(name, device_of(values), values)
    except (ValueError, TypeError, backends.BackendUnavailable) as error:
        return str(error)


def _taken(op: Op, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """Values of all arguments as the dispatcher passes them on; raises what names the one it does not take."""
    arguments = op.functional._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    unknown = (set(keywords) - {a.name for a in arguments}) | (set(keywords) & set(positional[: len(inputs)]))
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))}: given twice or not among the arguments of {op.name}")
    if len(inputs) > len(positional):
        rest = [a.name for a in arguments[len(positional) :]]
        then = f"; {', '.join(rest)} go by keyword" if rest else ""
        raise TypeError(f"inputs: {len(inputs)} given by position, {op.name} takes {len(positional)}{then}")
    given = dict(zip(positional, inputs, strict=False)) | keywords
    try:
        with _StopAt(op):
            op.functional(*inputs, **keywords)
    except _Reached as reached:
        inputs, keywords = reached.args
        given = dict(zip(positional, inputs, strict=False)) | keywords
        return [given.get(a.name, a.default_value) for a in arguments]
    except (RuntimeError, TypeError) as error:
        values = _as_python(op, inputs, keywords)
        if values is not None:
            return values
        reason = refused(op, inputs, keywords)
        if reason is not None:
            raise TypeError(reason) from None
        # the dispatcher's first line names the argument, the others repeat the schema
        raise TypeError(str(error).partition("\n")[0]) from None
    raise AssertionError(f"{op.name}: the dispatcher did not reach it")


def _as_python(op: Op, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any] | None:
    """The values that the op's Python function makes of a call; None where it refuses the call, or there is none."""
    function, _ = _PYTHON_FORMS.get(op.name, (None, ()))
    if function is None:
        return None
    try:
        with _StopAt(op):
            function(*inputs, **keywords)
    except _Reached as reached:
        values, named = reached.args
        arguments = op.functional._schema.arguments
        given = {a.name: value for a, value in zip(arguments, values, strict=False)} | named
        return [given.get(a.name, a.default_value) for a in arguments]
    except (RuntimeError, ValueError, TypeError):
        return None
    raise AssertionError(f"{op.name}: its Python function does not call it")


def takes_packed(*kinds: type) -> Callable[[_Function], _Function]:
    """Decorator of an op's Python function of the same name that takes more than the op: objects of `kinds` in place of
    their tensors, numbers for tensors."""

    def record(function: _Function) -> _Function:
        _PYTHON_FORMS[function.__name__] = (function, kinds)
        return function

    return record


class _Reached(Exception):
    """The op was called; its arguments are those of the exception."""


class _StopAt(TorchDispatchMode):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is self.op.functional:
            raise _Reached(args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _unpacked(op: Op, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's own arguments, from those of its Python function when a packed object is among them."""
    function, kinds = _PYTHON_FORMS.get(op.name, (None, ()))
    if function is None or not any(isinstance(value, kinds) for value in (*inputs, *keywords.values())):
        return inputs, keywords
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(*inputs, **keywords).arguments
    except TypeError as error:
        raise TypeError(f"{op.name}: {error}") from None
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.name not in bound:
            raise TypeError(f"{parameter.name}: is missing")
    try:
        with _StopAt(op):
            function(*inputs, **keywords)
    except _Reached as reached:
        return reached.args
    raise AssertionError(f"{op.name}: its Python function does not call it")
