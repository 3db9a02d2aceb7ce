"""The acceptance rules in eager PyTorch: the definition every kernel must match."""

from __future__ import annotations

import torch


def accept_prefix(
    candidates: torch.Tensor,  # [B, R]
    target: torch.Tensor,  # [B, R]
    stop_ids: torch.Tensor,  # [B, E] or [E]
    budget: torch.Tensor,  # [B]
    num_candidates: torch.Tensor | None,  # [B]
    accept_len: torch.Tensor,  # [B] out
    commit_len: torch.Tensor,  # [B] out
    bonus: torch.Tensor,  # [B] out
    out_tokens: torch.Tensor,  # [B, R] out
    finished: torch.Tensor,  # [B] out
) -> None:
    rows, width = candidates.shape
    column = torch.arange(width, device=candidates.device)
    limit = torch.full((rows,), width - 1, device=candidates.device) if num_candidates is None else num_candidates
    live = (budget > 0) & (limit >= 0)

    match = (candidates[:, 1:] == target[:, :-1]) & (candidates[:, 1:] >= 0) & (column[:-1] < limit[:, None])
    accepted = match.long().cumprod(dim=1).sum(dim=1) * live  # [B]

    # row j < m of the target equals candidate j + 1; row m is the correction or bonus
    stops = stop_ids if stop_ids.dim() == 1 else stop_ids[:, None, :]
    is_stop = (target[:, :, None] == stops).any(dim=2)  # [B, R]
    is_stop &= target >= 0
    valid = (column <= accepted[:, None]) & (target >= 0) & live[:, None]
    valid &= column < budget[:, None]
    stopped_before = is_stop.long().cumsum(dim=1) - is_stop.long() > 0
    valid &= ~stopped_before

    count = valid.long().cumprod(dim=1).sum(dim=1)  # [B]
    last = (count - 1).clamp(min=0)[:, None]
    emitted = column < count[:, None]
    accept_len.copy_(accepted)
    commit_len.copy_(count)
    out_tokens.copy_(torch.where(emitted, target.long(), -1))
    bonus.copy_(torch.where(count > 0, target.gather(1, last)[:, 0].long(), -1))
    stopped = (is_stop & emitted).any(dim=1)
    exhausted = live & (count >= budget)
    finished.copy_(torch.where(stopped, 1, torch.where(exhausted, 2, 0)))
