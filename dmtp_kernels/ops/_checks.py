"""Argument checks shared by the ops: each raises an error that names the argument, what it was and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

INDEX_DTYPES = (torch.int32, torch.int64)
_MOST_FLOAT = torch.finfo(torch.float32).max
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str | None],
    dtypes: Sequence[torch.dtype],
    symbols: dict[str, int],
    *,
    last_contiguous: bool = True,
    like: Mapping[str, str] | None = None,
) -> None:
    """Check rank, sizes and dtype of one tensor.

    `shape` holds ints (exact), None (any) or symbol names; a symbol is bound at its first use in `symbols` and must
    agree afterwards, so the error can say which symbol disagreed, and with `like` (symbol, or `dtype` -> the argument
    that bound it) with what.
    """
    if tensor.dtype not in dtypes:
        choice = "one of " if len(dtypes) > 1 else ""
        wanted = ", ".join(str(d) for d in dtypes) + _source(like, "dtype")
        raise TypeError(f"{name}: dtype is {tensor.dtype}, must be {choice}{wanted}")
    sizes = tensor.shape  # a new object at every access
    if len(sizes) != len(shape):
        wanted = ", ".join("*" if s is None else str(s) for s in shape)
        raise ValueError(f"{name}: has {tensor.dim()} dimensions {tuple(sizes)}, must be [{wanted}]")
    for axis, want in enumerate(shape):
        if want is None:
            continue
        got = sizes[axis]
        if isinstance(want, str):
            if want not in symbols:
                symbols[want] = got
                continue
            if got != symbols[want]:
                source = _source(like, want)
                raise ValueError(f"{name}: dimension {axis} ({want}) is {got}, must be {symbols[want]}{source}")
        elif got != want:
            raise ValueError(f"{name}: dimension {axis} is {got}, must be {want}")
    if last_contiguous and sizes and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension has stride {tensor.stride(-1)}, must be contiguous (stride 1)")


def _source(like: Mapping[str, str] | None, symbol: str) -> str:
    return f" like {like[symbol]}" if like and symbol in like else ""


def check_same_device(first: str, device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Every given tensor must live on `device`, the device of argument `first`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: is on {tensor.device}, must be on {device} like {first}")


def check_instance(name: str, value: object, kind: type) -> None:
    """`value` must be an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: is a {type(value).__name__}, must be a {kind.__name__}")


def check_whole(name: str, value: object) -> None:
    """`value` must be an int."""
    if not isinstance(value, (Integral, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r}, must be a whole number")


def check_real(name: str, value: object) -> None:
    """`value` must be an int or a float."""
    if not isinstance(value, (Real, torch.SymFloat)) or isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r}, must be a number")


def check_list(name: str, value: object, of: str) -> None:
    """`value` must be a list or a tuple, `of` says of what."""
    if not isinstance(value, (list, tuple)):
        what = "one tensor" if isinstance(value, torch.Tensor) else "None" if value is None else f"{value!r}"
        raise TypeError(f"{name}: is {what}, must be a list, {of}")


def as_scale(name: str, scale: torch.Tensor | float, device: torch.device | None) -> torch.Tensor:
    """A scale given as a number becomes an fp32 tensor `[]` on `device`."""
    if isinstance(scale, torch.Tensor):
        return scale
    check_real(name, scale)
    check_range(name, float(scale), -_MOST_FLOAT, _MOST_FLOAT)
    return torch.full((), float(scale), dtype=torch.float32, device=device)


def check_part(owner: str, check: Callable[..., None], *values: Any) -> None:
    """Run `check(*values)`; its error then names a part of the argument `owner`."""
    try:
        check(*values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner}.{error}") from None


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: is {value!r}, must be one of {', '.join(choices)}")


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """`low <= value <= high` (no upper bound when `high` is None); NaN is outside."""
    if not value >= low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name}: is {value}, must be {bound}")
