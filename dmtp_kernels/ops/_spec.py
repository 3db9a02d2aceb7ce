"""What an op declares about itself for tests, benchmarks and profilers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One input of an op and why it is worth running."""

    name: str
    why: str
    make: Callable[[torch.Generator], tuple[Any, ...]]
    """Inputs in schema order."""


@dataclass(frozen=True)
class Spec:
    """Inputs, error budget and the least traffic of one op.

    `floor_bytes(*inputs)` is what a perfect kernel must load and store, each byte once; `flops(*inputs)` what it must
    compute. `exact` ops return integers or copies and are compared bit for bit; the others by the error budget of
    `dmtp_kernels.testing.tolerance`.
    """

    op: str
    cases: tuple[Case, ...]
    floor_bytes: Callable[..., int]
    flops: Callable[..., int]
    exact: bool


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of all given tensors (a strided view counts its own elements)."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
