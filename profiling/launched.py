"""Whether a launch is one that `config.variants()` lists, so that what was compiled is what runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dmtp_kernels.ops._variant import Variant
from dmtp_kernels.testing.watch import Launch

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_DEFAULTS = {"num_warps": 4, "num_stages": 3}


def differences(launch: Launch, variant: Variant) -> list[str]:
    """What keeps `variant` from being the code of `launch`; empty when it is."""
    if variant.kernel.rpartition(":")[2] != launch.kernel:
        return ["another kernel"]
    found = []
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    given = _DEFAULTS | launch.options
    found += [f"{k} is {given.get(k)!r}" for k in {*options, *given} if options.get(k) != given.get(k)]
    for name, value in launch.arguments.items():
        if name in variant.constants:
            if value != variant.constants[name] or type(value) is not type(variant.constants[name]):
                found.append(f"{name} is {_short(value)}")
        elif name not in variant.signature:
            found.append(f"{name} is not in the variant")
        elif (kind := _kind(value)) not in (None, variant.signature[name]):
            found.append(f"{name} is {kind}")
        elif name in variant.aligned and any(_address(v) % 16 for v in _values(value)):
            found.append(f"{name} is not divisible by 16")
    return sorted(found)


def closest(launch: Launch, variants: Iterable[Variant]) -> tuple[str | None, list[str]]:
    """Name of the variant that differs least from `launch`, and the differences; None and [] without a candidate."""
    candidates = [v for v in variants if v.kernel.rpartition(":")[2] == launch.kernel]
    compared = [(len(found := differences(launch, v)), v.name, found) for v in candidates]
    return min(compared)[1:] if compared else (None, [])


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _kind(value: Any) -> str | tuple[str | None, ...] | None:
    """Type of a runtime argument as Triton spells it; None where the spelling is the kernel's choice."""
    if isinstance(value, tuple):
        return tuple(str(_kind(v)) for v in value)
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else "None" if value is None else None


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else int(value)


def _short(value: Any) -> str:
    return f"a {_POINTERS[value.dtype]}" if isinstance(value, torch.Tensor) else repr(value)
