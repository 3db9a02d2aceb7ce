"""What an op declares about itself for tests, benchmarks and profilers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class CudaTraffic:
    """What an op's CUDA kernels must move in a case of `Traffic`; all their accesses to global memory are recorded.

    Attributes:
        kernels: as in `Traffic`, in the order of their launches, each launched once.
        scaled: arguments of the op whose full size is `Traffic.scale` times theirs; all other tensors have full size.
        scratch: `scratch(*inputs)`: bytes of each tensor that the kernels keep in scratch memory, in their order there.
        limit: the greatest ratio of bytes to floor.
    """

    kernels: Mapping[str, Callable[..., int] | None]
    scaled: tuple[str, ...] = ()
    scratch: Callable[..., Mapping[str, int]] | None = None
    limit: float = 1.05


@dataclass(frozen=True)
class Traffic:
    """What the kernels of one op must move at one of its large shapes; `python -m profiling.traffic` measures them.

    The op runs interpreted, so `case` is a large shape scaled down in the vocabulary alone, which its `why` says. A
    `spec.py` that has such cases lists them as `TRAFFIC: tuple[Traffic, ...]`.

    Attributes:
        kernels: every kernel the op launches for the case, by the name of its function, with `floor_bytes(*inputs)`:
            what it must load and store, each byte once. None where that depends on the data: it gets no ratio.
        scale: rows of the full vocabulary over rows of the case. A tensor whose size times `scale` is at most 16 MiB
            counts as held by the L2 cache.
        unscaled: kernel arguments whose size does not grow with the vocabulary.
        limit: the greatest ratio of bytes to floor.
        cuda: the same of the CUDA kernels; None where there are none, or some do not record what they access.
    """

    op: str
    case: Case
    kernels: Mapping[str, Callable[..., int] | None]
    scale: float = 1.0
    unscaled: tuple[str, ...] = ()
    limit: float = 1.05
    cuda: CudaTraffic | None = None


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of all given tensors (a strided view counts its own elements)."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
