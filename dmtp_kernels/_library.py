"""Registration of one op in the `dmtp` torch library.

An op has two forms. The base form `dmtp::<name>_out` writes into caller buffers and returns nothing, so that it can
be captured; `dmtp::<name>` allocates its outputs and calls the same launcher. Both are defined with
`torch.library.Library` (`torch.library.custom_op` costs 19-46 us per call on CPU against 2-7 us for this).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch

from dmtp_kernels import backends
from dmtp_kernels._calls import Passed, allocate

_LIBRARY = torch.library.Library("dmtp", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_DISPATCH_KEYS = ("CPU", "CUDA")
_OUT_ALIASES = "abcdefgh"
_SCALARS: dict[str, Any] = {"int": Integral, "float": Real, "bool": bool, "str": str}

_Function = TypeVar("_Function", bound=Callable[..., Any])
Shape = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class Op:
    """The two bound overloads of one op and the argument check both run before any launch."""

    name: str
    functional: torch._ops.OpOverload
    out: torch._ops.OpOverload
    check: Callable[..., None]

    def call(self, *inputs: Any, **keywords: Any) -> Any:
        """`functional`; what the dispatcher refuses is a TypeError of one line that names the argument."""
        try:
            return self.functional(*inputs, **keywords)
        except (RuntimeError, TypeError) as error:
            # only the dispatcher ends with the schema
            reason = refused(self, inputs, keywords) if f"Declaration: dmtp::{self.name}(" in str(error) else None
            if reason is None:
                raise
            raise TypeError(reason) from None


_OPS: dict[str, Op] = {}


def define_op(
    name: str,
    *,
    args: str,
    outs: Sequence[str],
    shapes: Callable[..., Sequence[Shape]],
    check: Callable[..., None],
    implementations: dict[str, str],
    none_hints: Mapping[str, str] | None = None,
) -> Op:
    """Define `dmtp::<name>` and `dmtp::<name>_out` and return their bound overloads.

    Args:
        name: public op name.
        args: schema of the inputs, e.g. `"Tensor candidates, Tensor target, *, int k=1"`. An input the op mutates
            carries its alias annotation here (`Tensor(z!) cache`, `Tensor(z!)[] caches`); letters a..h belong to the
            outputs.
        outs: names of the output tensors, in order.
        shapes: `shapes(*inputs) -> [(shape, dtype), ...]`, one pair per output.
        check: `check(*inputs)`, raises `ValueError` or `TypeError` naming the argument. It sees shapes, dtypes, strides
            and devices, never data: it also runs under FakeTensor.
        implementations: backend name -> `"module:function"`, imported at first use and called as
            `function(*inputs, *outputs)`; writes the outputs, returns nothing.
        none_hints: required tensor -> what to pass, or why it is needed; said where a caller gives None for it.

    All callables receive every schema argument positionally, defaults filled in. Buffers passed to the `_out` form must
    have exactly the shape and dtype that `shapes` gives, and overlap neither each other nor an input.
    """
    backends.register(name, implementations)
    n_out = len(outs)
    returns = "Tensor" if n_out == 1 else "(" + ", ".join(["Tensor"] * n_out) + ")"
    separator = ", " if "*" in args else ", *, "
    buffers = ", ".join(f"Tensor({_OUT_ALIASES[i]}!) {out}" for i, out in enumerate(outs))
    _LIBRARY.define(f"{name}({args}) -> {returns}", tags=_TAGS)
    _LIBRARY.define(f"{name}_out({args}{separator}{buffers}) -> ()", tags=_TAGS)
    functional = getattr(torch.ops.dmtp, name).default
    out_form = getattr(torch.ops.dmtp, f"{name}_out").default
    parameters = tuple((a.name, a.default_value) for a in functional._schema.arguments)
    # the dispatcher takes None for `Tensor`
    required = tuple((i, a.name) for i, a in enumerate(functional._schema.arguments) if str(a.type) == "Tensor")

    mutated = tuple(
        (i, a.name)
        for i, a in enumerate(functional._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )

    def check_all(*values: Any) -> None:
        for i, label in required:
            if values[i] is None:
                hint = f" ({none_hints[label]})" if none_hints and label in none_hints else ""
                raise TypeError(f"{label}: is None, must be a tensor{hint}")
        check(*values)
        for i, label in mutated:
            if isinstance(values[i], torch.Tensor):
                _check_repeats(label, values[i])
            else:
                for j, tensor in enumerate(values[i] or ()):
                    _check_repeats(f"{label}[{j}]", tensor)

    def bind(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        # the dispatcher drops arguments that equal their default
        values = list(inputs[: len(parameters)])
        values += [kwargs.get(key, default) for key, default in parameters[len(values) :]]
        return values

    passed = Passed(check_all, shapes)

    def check_out(values: list[Any], outputs: list[Any]) -> None:
        check_all(*values)
        _check_outputs(name, outs, outputs, shapes(*values), device_of(values))

    passed_out = Passed(check_out, lambda *_: ())

    # inputs may require grad; the ops have no derivative and write their outputs in place
    @_without_grad
    def run(*inputs: Any, **kwargs: Any) -> Any:
        values = bind(inputs, kwargs)
        wanted = passed(values)
        device = device_of(values)
        outputs = allocate(wanted, device)
        backends.implementation(name, device)(*values, *outputs)
        return outputs[0] if n_out == 1 else tuple(outputs)

    @_without_grad
    def run_out(*inputs: Any, **kwargs: Any) -> None:
        values = bind(inputs, kwargs)
        outputs = [kwargs[out] for out in outs]
        passed_out([values, outputs])
        backends.implementation(name, device_of(values))(*values, *outputs)

    def fake(*inputs: Any, **kwargs: Any) -> Any:
        values = bind(inputs, kwargs)
        check_all(*values)
        device = device_of(values)
        outputs = [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in shapes(*values)]
        return outputs[0] if n_out == 1 else tuple(outputs)

    def fake_out(*inputs: Any, **kwargs: Any) -> None:
        values = bind(inputs, kwargs)
        check_out(values, [kwargs[out] for out in outs])

    for key in _DISPATCH_KEYS:
        _LIBRARY.impl(name, run, key)
        _LIBRARY.impl(f"{name}_out", run_out, key)
    torch.library.register_fake(f"dmtp::{name}", fake, lib=_LIBRARY)
    torch.library.register_fake(f"dmtp::{name}_out", fake_out, lib=_LIBRARY)
    op = _OPS[name] = Op(name, functional, out_form, check_all)
    return op


def _without_grad(function: _Function) -> _Function:
    """`function` without grad mode; `torch.no_grad` as a decorator costs 3 us a call even where it is off already."""

    def call(*inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return function(*inputs, **kwargs)
        return function(*inputs, **kwargs)

    return cast(_Function, call)


def registered() -> tuple[str, ...]:
    """Names of all defined ops."""
    return tuple(sorted(_OPS))


def kind_of(value: Any) -> str:
    """What a value is, for an error that wants a tensor."""
    return "None" if value is None else f"a {type(value).__name__}"


def refused(op: Op, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    """The first argument of a call that the dispatcher cannot take, and why; None where there is none."""
    arguments = op.functional._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    given = dict(zip(positional, inputs, strict=False)) | keywords
    for argument in arguments:
        reason = _refused(argument, given)
        if reason is not None:
            return f"{argument.name}: {reason}"
    return None


def _refused(argument: Any, given: dict[str, Any]) -> str | None:
    """Why one argument of a call that the dispatcher refused may not be what it is; None: it may."""
    kind = str(argument.type)
    if argument.name not in given:
        if argument.has_default_value():
            return None
        return "is missing, must be a tensor" if kind == "Tensor" else "is missing"
    value = given[argument.name]
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    or_none = " or None" if inner != kind else ""
    if value is None and or_none:
        return None
    if inner == "Tensor" and not isinstance(value, torch.Tensor):
        return f"is {kind_of(value)}, must be a tensor{or_none}"
    if inner in _SCALARS and not isinstance(value, _SCALARS[inner]):
        return f"is {value!r}, must be {inner}{or_none}"
    return None


def device_of(values: list[Any]) -> torch.device:
    """Device of the first tensor among a call's arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device
    raise TypeError("no tensor among the arguments")


def _check_outputs(
    name: str, labels: Sequence[str], outputs: list[Any], wanted: Sequence[Shape], device: torch.device
) -> None:
    for label, got, (shape, dtype) in zip(labels, outputs, wanted, strict=True):
        if not isinstance(got, torch.Tensor):
            raise TypeError(f"{name}_out: {label} is {kind_of(got)}, must be a tensor")
        if tuple(got.shape) != tuple(shape) or got.dtype != dtype:
            raise ValueError(f"{name}_out: {label} is {tuple(got.shape)} {got.dtype}, must be {tuple(shape)} {dtype}")
        _check_repeats(f"{name}_out: {label}", got, " has")
        if got.device != device:
            raise ValueError(f"{name}_out: {label} is on {got.device}, must be on {device} like the inputs")


def _check_repeats(label: str, written: torch.Tensor, verb: str = ": has") -> None:
    if any(size > 1 and stride == 0 for size, stride in zip(written.shape, written.stride(), strict=True)):
        raise ValueError(f"{label}{verb} strides {written.stride()}, must not repeat elements (stride 0)")
