"""Sampling in eager PyTorch, float64 inside: the definition every kernel must match."""

from __future__ import annotations

import torch

from dmtp_kernels.ops.sample import BAD_PARAMETER, NAN_IGNORED, NOTHING_TO_CHOOSE, philox
from dmtp_kernels.ops.sample.filters import lowest_argmax, race, scaled, truncated


def sample_rows(
    logits: torch.Tensor,  # [n, V]
    temperature: torch.Tensor,  # [n]
    seed: torch.Tensor,  # [n]
    position: torch.Tensor,  # [n]
    top_k: torch.Tensor | None,  # [n]
    top_p: torch.Tensor | None,  # [n]
    num_valid: int | None,
    stream: int,
    token: torch.Tensor,  # [n] out
    status: torch.Tensor,  # [n] out
) -> None:
    x = logits[:, :num_valid]
    nan = x.isnan()
    x = torch.where(nan, -torch.inf, x)
    empty = torch.isneginf(x).all(dim=1)
    greedy = temperature == 0
    bad = ~(temperature >= 0) | torch.isinf(temperature)
    if top_p is not None:
        bad |= top_p.isnan() & ~greedy

    best = lowest_argmax(x)
    weight = truncated(scaled(x, temperature), x, top_k, top_p)
    drawn = race(weight, philox.exponential(seed, position, stream, x.shape[1]))
    # several +inf entries are one certain answer, the lowest, as in the greedy case
    certain = greedy | torch.isposinf(x).any(dim=1)
    chosen = torch.where(certain, best, drawn)
    token.copy_(torch.where(empty | bad, -1, chosen))
    status.copy_(nan.any(dim=1) * NAN_IGNORED + empty * NOTHING_TO_CHOOSE + bad * BAD_PARAMETER)
