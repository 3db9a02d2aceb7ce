"""Tensors whose surroundings nobody may touch: pages without access, and guard bytes where no page fits."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

_PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fence:
    """`size` bytes between two pages without access: at the end of what lies between, or at its start.

    An access beyond that side faults; what is written beyond the other, in the same page, `check` finds.
    """

    def __init__(self, size: int, at_end: bool) -> None:
        inner = max(1, -(-size // _PAGE)) * _PAGE
        self._map = mmap.mmap(-1, inner + 2 * _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (start, start + _PAGE + inner):
            if _mprotect(page, _PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        whole = torch.frombuffer(self._map, dtype=torch.uint8, count=inner, offset=_PAGE)
        first = inner - size if at_end else 0
        self.inside = whole[first : first + size]
        self._outside, self._start = (whole[:first], -first) if at_end else (whole[size:], size)
        self._guards = (torch.arange(40, 40 + inner - size) % 251 + 1).to(torch.uint8)
        self._outside.copy_(self._guards)

    def check(self) -> None:
        """Raises AssertionError where a guard byte changed."""
        changed = self._outside != self._guards
        if changed.any():
            first = int(changed.nonzero()[0]) + self._start
            raise AssertionError(f"{int(changed.sum())} bytes outside were written, the first at {first}")


class Fenced:
    """Copies of a call's arguments; tensors that share memory still do.

    `arguments` are tensors, sequences of them, and other values. `restore` undoes what a call wrote.
    """

    def __init__(self, arguments: Any, at_end: bool) -> None:
        self._at_end = at_end
        self._fences: dict[int, tuple[Fence, torch.Tensor]] = {}
        self.arguments = self._copy(arguments)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._copy(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._fences or storage.nbytes() == 0:
            before = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
            fence = Fence(storage.nbytes(), self._at_end)
            fence.inside.copy_(before)
            if storage.nbytes() == 0:
                return value
            self._fences[storage.data_ptr()] = fence, before
        inside = self._fences[storage.data_ptr()][0].inside
        flat = inside.view(value.dtype)
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset() + value.storage_offset())

    def restore(self) -> None:
        for fence, before in self._fences.values():
            fence.inside.copy_(before)

    def check(self) -> None:
        for fence, _ in self._fences.values():
            fence.check()
