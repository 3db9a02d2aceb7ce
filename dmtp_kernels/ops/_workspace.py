"""Scratch memory that outlives a call, so that the `_out` forms allocate nothing and can be captured."""

from __future__ import annotations

import threading

import torch

_buffers: dict[tuple[object, ...], torch.Tensor] = {}
# a captured graph keeps the address of the buffer it saw, so a buffer that was outgrown stays
_outgrown: list[torch.Tensor] = []


def workspace(key: str, device: torch.device, nbytes: int) -> torch.Tensor:
    """At least `nbytes` of uint8 scratch, 256-byte aligned on a GPU, kept per use, device, stream and thread.

    Its content is whatever the last use left. The first call with a size must happen outside graph capture.

    Raises:
        RuntimeError: it would have to grow while a graph is being captured.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    owner = (key, device, stream, threading.get_ident())
    buffer = _buffers.get(owner)
    if buffer is None or buffer.numel() < nbytes:
        if capturing:
            raise RuntimeError(f"{key}: needs {nbytes} bytes of scratch first seen during capture; run it once before")
        if buffer is not None:
            _outgrown.append(buffer)
        buffer = _buffers[owner] = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    return buffer
