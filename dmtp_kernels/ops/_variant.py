"""What a Triton kernel looks like at one of the configurations it is launched with, for the compile proofs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One kernel at one configuration.

    Attributes:
        name: unique within its op, e.g. `lm_head_screen_kernel/int8/n8`.
        kernel: `"module:attribute"` of the `@triton.jit` function.
        signature: type of every runtime argument as Triton spells it (`*bf16`, `i32`, `fp32`), a tuple of them for a
            tuple.
        constants: value of every `tl.constexpr` argument, and of pointers that are None.
        aligned: runtime arguments whose value, or every value of the tuple, is divisible by 16.
        num_warps, num_stages, options: launch options.
        streams: pointer arguments that carry the bulk of the bytes; their global loads must be 16 bytes wide.
    """

    name: str
    kernel: str
    signature: Mapping[str, str | tuple[str, ...]]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    streams: tuple[str, ...] = ()
