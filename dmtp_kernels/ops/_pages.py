"""Large CPU buffers on huge pages."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_HUGE = 1 << 21
_SMALLEST = 1 << 23
_MADV_HUGEPAGE = 14


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, on 2 MiB pages where the tensor is large, on a CPU, and Linux has pages to give.

    A pass over such a buffer misses the translation cache less: a streaming read of 512 MiB with two threads went from
    14.0 to 15.8 GB/s (median, on a machine under other load).
    """
    size = math.prod(shape) * dtype.itemsize
    advise = _madvise() if device.type == "cpu" and size >= _SMALLEST else None
    if advise is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    room = torch.empty(size + _HUGE, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE
    # before the first touch, which is what gives a page its size; a refusal leaves small pages
    advise(room.data_ptr() + start, size - size % _HUGE, _MADV_HUGEPAGE)
    return room[start : start + size].view(dtype).view(tuple(shape)).zero_()


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
