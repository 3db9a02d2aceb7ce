"""Scratch memory that outlives a call, so that the `_out` forms allocate nothing once they have run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_buffers: dict[tuple[object, ...], torch.Tensor] = {}


def workspace(key: str, device: torch.device, nbytes: int) -> torch.Tensor:
    """At least `nbytes` of uint8 scratch, kept per use, device, stream and thread; its content is undefined.

    During graph capture the memory comes from the graph's own pool instead: a graph must not share scratch with
    launches on other streams, and keeps its pool for as long as it lives.
    """
    return _kept(key, device, nbytes, torch.uint8, torch.empty)


def counters(key: str, device: torch.device, count: int) -> torch.Tensor:
    """At least `count` int32 counters, kept like `workspace`: 0 at first, and its kernels leave them 0."""
    return _kept(f"{key} counters", device, count, torch.int32, torch.zeros)


def _kept(
    key: str, device: torch.device, size: int, dtype: torch.dtype, make: Callable[..., torch.Tensor]
) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make(max(size, 1), dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    owner = (key, device, stream, threading.get_ident())
    buffer = _buffers.get(owner)
    if buffer is None or buffer.numel() < size:
        # a tensor made in inference mode could not be written outside it
        with torch.inference_mode(False):
            buffer = _buffers[owner] = make(max(size, 1), dtype=dtype, device=device)
    return buffer
