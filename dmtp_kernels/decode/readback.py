"""A round's results on their way to the host, which reads them one round later."""

from __future__ import annotations

import torch

from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import left


class Readback:
    """Copies results of rounds to the host without waiting for them; two may be under way."""

    def __init__(self, max_batch: int, rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        shapes = (((max_batch, rows), torch.int64), *[((max_batch,), torch.int32)] * 3)
        self._buffers = [
            [torch.empty(shape, dtype=dtype, pin_memory=self._cuda) for shape, dtype in shapes] for _ in range(2)
        ]

    def start(self, state: BatchState) -> Landing:
        """Begin to copy what the round that was just launched over `state` decided."""
        accepted = left(state.work.accepted)
        results = accepted.out_tokens, accepted.finished, accepted.accept_len, state.index.error
        buffers = self._buffers[0]
        self._buffers.reverse()
        # without the event the host could read what a copy from the device has not written yet
        event = torch.cuda.Event() if self._cuda else None
        copies = [host[: len(t)].copy_(t, non_blocking=True) for host, t in zip(buffers, results, strict=True)]
        if event is not None:
            event.record()
        return Landing(copies, event)


class Landing:
    """The results of one round, there once its event has passed."""

    def __init__(self, copies: list[torch.Tensor], event: torch.cuda.Event | None) -> None:
        self._copies, self._event = copies, event

    def read(self) -> tuple[list[list[int]], list[int], list[int], list[int]]:
        """Emitted tokens (-1: none), `finished`, accepted candidates and error bits of every row."""
        if self._event is not None:
            self._event.synchronize()
        tokens, finished, matched, error = (t.tolist() for t in self._copies)
        return tokens, finished, matched, error
