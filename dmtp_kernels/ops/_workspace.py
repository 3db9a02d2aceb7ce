"""Scratch memory that outlives a call, so that the `_out` forms allocate nothing once they have run."""

from __future__ import annotations

import threading

import torch

_buffers: dict[tuple[object, ...], torch.Tensor] = {}


def workspace(key: str, device: torch.device, nbytes: int) -> torch.Tensor:
    """At least `nbytes` of uint8 scratch, kept per use, device, stream and thread; its content is undefined.

    During graph capture the memory comes from the graph's own pool instead: a graph must not share scratch with
    launches on other streams, and keeps its pool for as long as it lives.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    owner = (key, device, stream, threading.get_ident())
    buffer = _buffers.get(owner)
    if buffer is None or buffer.numel() < nbytes:
        # a tensor made in inference mode could not be written outside it
        with torch.inference_mode(False):
            buffer = _buffers[owner] = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    return buffer
