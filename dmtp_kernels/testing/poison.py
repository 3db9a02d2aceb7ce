"""Memory that shows who read or wrote what they must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_GUARD = 64


def poison(dtype: torch.dtype) -> float | int:
    """A value that spoils whatever is computed from it: NaN, the largest integer, or True."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


def poison_rows(tensor: torch.Tensor, rows: torch.Tensor | Sequence[int], dim: int = 0) -> torch.Tensor:
    """Fill the rows of `tensor` along `dim` that are not listed in `rows` with poison, in place; returns `tensor`.

    For caches and tables: list what the op may read.
    """
    unused = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
    unused[torch.as_tensor(rows, dtype=torch.long, device=tensor.device)] = False
    tensor.movedim(dim, 0)[unused] = poison(tensor.dtype)
    return tensor


@dataclass(frozen=True)
class Guarded:
    """A buffer full of poison whose surroundings are guards."""

    tensor: torch.Tensor
    _memory: torch.Tensor
    _before: torch.Tensor
    _guards: torch.Tensor

    def check(self, *, written: bool = True) -> None:
        """Fail if a guard changed or, with `written`, if a floating-point element is still NaN.

        Raises:
            AssertionError: says how many, and where the first guard is, in elements from the start of the buffer.
        """
        changed = self._memory.view(torch.uint8) != self._before
        changed = changed.reshape(self._memory.numel(), -1).any(dim=1) & self._guards
        if changed.any():
            first = int(changed.nonzero()[0]) - self.tensor.storage_offset()
            raise AssertionError(f"{int(changed.sum())} elements outside the buffer were written, the first at {first}")
        if written and self.tensor.is_floating_point() and self.tensor.isnan().any():
            left = int(self.tensor.isnan().sum())
            raise AssertionError(f"{left} of {self.tensor.numel()} elements were not written, or with NaN")


def guarded(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, row_gap: int = 0
) -> Guarded:
    """An output buffer of `shape` filled with poison, with guards before, behind and, `row_gap` wide, between rows."""
    wide = [*shape[:-1], shape[-1] + row_gap] if shape else []
    strides = torch.empty(wide, device="meta").stride()
    size = 2 * _GUARD + torch.Size(wide).numel()
    memory = torch.empty(size, dtype=dtype, device=device)
    # every guard element has its own bytes, so that one copied to another place shows
    memory.view(torch.uint8).copy_(torch.arange(memory.nbytes, device=device) % 251 + 1)
    before = memory.view(torch.uint8).clone()  # bytes: a bool would be normalised
    tensor = memory.as_strided(tuple(shape), strides, _GUARD)
    guards = torch.ones(size, dtype=torch.bool, device=device)
    guards.as_strided(tuple(shape), strides, _GUARD).fill_(False)
    return Guarded(tensor.fill_(poison(dtype)), memory, before, guards)
