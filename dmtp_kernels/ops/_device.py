"""The device that launches are planned for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_planned = 0


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 0 for CPU tensors, whose kernels are interpreted: plan few, large programs."""
    return _multiprocessors(device) if device.type == "cuda" else _planned


@contextmanager
def planned_for(count: int) -> Iterator[None]:
    """Plan interpreted launches as for a GPU of `count` multiprocessors, to count what they would do there."""
    global _planned
    previous, _planned = _planned, count
    try:
        yield
    finally:
        _planned = previous
