"""Inputs and traffic of the acceptance rules."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, nbytes


def _prefix_case(batch: int, rows: int, dtype: torch.dtype, num_stop: int, ragged: bool) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        candidates = torch.randint(0, 3, (batch, rows), generator=generator).to(dtype)
        target = torch.randint(0, 3, (batch, rows), generator=generator).to(dtype)
        stop_ids = torch.randint(0, 4, (batch, num_stop), generator=generator).to(dtype)
        budget = torch.randint(0, rows + 3, (batch,), generator=generator).to(dtype)
        count = torch.randint(-1, rows + 1, (batch,), generator=generator).to(dtype) if ragged else None
        return candidates, target, stop_ids, budget, count

    return make


PREFIX = Spec(
    op="accept_prefix",
    cases=(
        Case("round", "the DMTP round: seven candidates, int64 ids", _prefix_case(8, 8, torch.int64, 2, False)),
        Case("int32", "vLLM passes int32 ids", _prefix_case(5, 8, torch.int32, 1, False)),
        Case("ragged", "rows with fewer candidates, finished rows, no stop ids", _prefix_case(33, 8, torch.int64, 0, True)),
        Case("anchor_only", "autoregressive rows: nothing to accept", _prefix_case(3, 1, torch.int64, 1, False)),
        Case("empty", "no live request", _prefix_case(0, 8, torch.int64, 1, False)),
    ),
    floor_bytes=lambda candidates, target, stop_ids, budget, count: (
        nbytes(candidates, target, stop_ids, budget, count)
        + candidates.shape[0] * (4 + 4 + 8 + 4)
        + candidates.numel() * 8
    ),
    flops=lambda candidates, target, *_: candidates.numel(),
    exact=True,
)

SPECS = (PREFIX,)
