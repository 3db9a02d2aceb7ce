"""One call of the corpus, and numbers that are the same in every process, on every machine and with every torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dmtp_kernels.testing.poison import poison

I32, I64 = torch.int32, torch.int64
EXTREME = (-(2**63), -(2**32), -(2**31) - 1, -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1)
EXTREME_32 = tuple(n for n in EXTREME if -(2**31) <= n < 2**31)
NAN, INF = float("nan"), float("inf")


def extreme(dtype: torch.dtype) -> tuple[int, ...]:
    """The edges of both index types that `dtype` can hold."""
    return EXTREME if dtype == I64 else EXTREME_32


def edges(dtype: torch.dtype) -> tuple[float, ...]:
    """Zeros, the smallest and the largest numbers, infinities and NaN of a type."""
    info = torch.finfo(dtype)
    denormal = info.smallest_normal * info.eps
    return (0.0, -0.0, denormal, -denormal, info.smallest_normal, info.max, -info.max, INF, -INF, NAN)


class Draws:
    """Tensors drawn by Python's own generator; real numbers are eighths, which every type holds exactly."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def _below(self, n: int) -> int:
        return self._random.getrandbits(53) % n

    def whole(self, *shape: int, low: int, high: int, dtype: torch.dtype = I64) -> torch.Tensor:
        """From `low` to `high - 1`."""
        count = math.prod(shape)
        return torch.tensor([low + self._below(high - low) for _ in range(count)], dtype=dtype).reshape(shape)

    def pick(self, *shape: int, of: Sequence[Any], dtype: torch.dtype = I64) -> torch.Tensor:
        """Elements of a list, all of them where there is room, in any order."""
        count = math.prod(shape)
        chosen = [of[i % len(of)] for i in self.order(max(count, len(of)))][:count]
        return torch.tensor(chosen, dtype=dtype).reshape(shape)

    def reals(
        self, *shape: int, dtype: torch.dtype = torch.float32, spread: int = 40, odd: Sequence[float] = ()
    ) -> torch.Tensor:
        """Eighths up to `spread / 8`; every seventh number or so is one of `odd`."""
        count = math.prod(shape)
        made = [(self._below(2 * spread + 1) - spread) / 8 for _ in range(count)]
        if odd:
            made = [odd[self._below(len(odd))] if self._below(7) == 0 else x for x in made]
        return torch.tensor(made, dtype=torch.float64).to(dtype).reshape(shape)

    def order(self, n: int) -> list[int]:
        """A permutation of 0 .. n - 1."""
        return sorted(range(n), key=lambda _: self._random.random())


@dataclass(frozen=True)
class Entry:
    """Inputs of an op in schema order, and what is adversarial about them."""

    op: str
    name: str
    why: str
    make: Callable[[Draws], tuple[Any, ...]]

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def inputs(self) -> tuple[Any, ...]:
        return self.make(Draws(self.id))


def gaps(tensor: torch.Tensor, gap: int = 3) -> torch.Tensor:
    """The same values with poison before, between and behind the rows: no stride but the last is what it was."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + gap), poison(tensor.dtype), dtype=tensor.dtype)
    return wide[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)


def column(tensor: torch.Tensor) -> torch.Tensor:
    """A `[B]` tensor as the middle column of a table full of poison."""
    table = torch.full((len(tensor), 3), poison(tensor.dtype), dtype=tensor.dtype)
    return table[:, 1].copy_(tensor)


def off(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element after the start of their memory."""
    return torch.cat([tensor.new_full((1,), poison(tensor.dtype)), tensor.flatten()])[1:].view(tensor.shape)
