"""See every memory access of an interpreted Triton kernel, and fail on one that leaves the tensors of its launch.

Needs `dmtp_kernels.testing.interpreter.install()`, which reports launches and accesses here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch


@dataclass(eq=False)
class Launch:
    """One launch of an interpreted kernel.

    `tensors` maps argument names to the tensors passed (`name[0]`, `name[1]`, ... in a tuple), `arguments` has every
    argument as it was given, `options` what the compiler would have been given besides.
    """

    kernel: str
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    program: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of one program.

    `addresses` has the byte address of every active lane, `size` the bytes each of them moves. `argument` names the
    launch argument that the pointer was computed from, or is None when it came from memory (a table of pointers).
    """

    launch: Launch
    argument: str | None
    kind: str
    addresses: np.ndarray
    size: int

    def owner(self) -> str | None:
        """The argument accessed: by the pointer's origin, else the first tensor that holds every address."""
        if self.argument is not None or self.addresses.size == 0:
            return self.argument
        held = (name for name, t in self.launch.tensors.items() if not outside(self.addresses, self.size, t).any())
        return next(held, None)


class OutOfBounds(AssertionError):
    """An interpreted kernel touched memory outside the tensors of its launch."""


Watcher = Callable[[Access], None]
_watchers: list[Watcher] = []
_launch_watchers: list[Callable[[Launch], None]] = []
_order: np.random.Generator | None = None


def watching() -> bool:
    """Whether anybody wants to see accesses now."""
    return bool(_watchers)


def report(access: Access) -> None:
    """Hand one access to every watcher."""
    for watcher in _watchers:
        watcher(access)


def launched(launch: Launch) -> None:
    """Hand one launch, before it runs, to everybody who counts them."""
    for watcher in _launch_watchers:
        watcher(launch)


@contextmanager
def watch_launches(watcher: Callable[[Launch], None]) -> Iterator[None]:
    """Call `watcher` with every kernel launched inside."""
    _launch_watchers.append(watcher)
    try:
        yield
    finally:
        _launch_watchers.remove(watcher)


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with every access of every kernel launched inside."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def outside(addresses: np.ndarray, size: int, tensor: torch.Tensor) -> np.ndarray:
    """Which of the accesses of `size` bytes at `addresses` do not lie in the elements of `tensor`.

    The gaps of a strided view are outside it. Views whose elements overlap count as their whole span.
    """
    item = tensor.element_size()
    offset = addresses.astype(np.int64) - tensor.data_ptr()
    dims = sorted(((s * item, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1), reverse=True)
    span = item + sum(stride * (n - 1) for stride, n in dims) if tensor.numel() else 0
    bad = (offset < 0) | (offset + size > span)
    nested = all(a >= b * n for (a, _), (b, n) in pairwise(dims))
    if span == tensor.numel() * item or not nested:
        return bad
    for byte in (0, size - 1):
        rest = offset + byte
        for stride, n in dims:
            rest = rest - np.clip(rest // stride, 0, n - 1) * stride
        bad |= rest >= item
    return bad


@contextmanager
def bounds_checked(*extra: torch.Tensor) -> Iterator[None]:
    """Raise `OutOfBounds` when a kernel launched inside leaves the elements of the tensors it was given.

    A pointer computed from an argument must stay inside that argument's elements (the gaps of a strided view are
    outside); one that was read from memory must lie in any argument or in one of `extra`. Masked-off lanes access
    nothing. The interpreter stops at the fault: nothing was read or written there.
    """

    def check(access: Access) -> None:
        launch = access.launch
        if access.argument is not None:
            allowed = [launch.tensors[access.argument]]
        else:
            allowed = [*launch.tensors.values(), *extra]
        bad = np.ones(access.addresses.shape, bool)
        for tensor in allowed:
            bad &= outside(access.addresses, access.size, tensor)
            if not bad.any():
                return
        where = "every argument"
        if access.argument is not None:
            tensor = allowed[0]
            first = int(access.addresses[bad][0]) - tensor.data_ptr()
            shape = f"{list(tensor.shape)} of {tensor.dtype} with strides {list(tensor.stride())}"
            where = f"{access.argument} ({shape}), first at byte {first}"
        raise OutOfBounds(
            f"{launch.kernel}, program {launch.program}: {access.kind} of {access.size} bytes at {int(bad.sum())} of "
            f"{bad.size} addresses outside {where}"
        )

    with watch(check):
        yield


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Run the programs of every grid launched inside in a random order: a kernel that needs one order shows."""
    global _order
    previous, _order = _order, np.random.default_rng(seed)
    try:
        yield
    finally:
        _order = previous


def program_order(count: int) -> np.ndarray | None:
    """The order to run `count` programs in, None for as they come."""
    return None if _order is None else _order.permutation(count)
