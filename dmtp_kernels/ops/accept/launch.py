"""Launches of the Triton kernels of the acceptance rules."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from dmtp_kernels.ops.accept import kernels
from dmtp_kernels.ops.accept.config import prefix_config


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
    batch, rows = candidates.shape
    if batch == 0:
        return
    config = prefix_config(rows, candidates.device)
    stop_stride = stop_ids.stride(0) if stop_ids.dim() == 2 else 0
    # Triton launches on the current device
    with torch.cuda.device(candidates.device) if candidates.device.type == "cuda" else nullcontext():
        kernels.accept_prefix_kernel[(-(-batch // config.requests),)](
            candidates, candidates.stride(0), target, target.stride(0),
            stop_ids, stop_stride, stop_ids.shape[-1], budget, num_candidates,
            accept_len, commit_len, bonus, out_tokens, finished,
            accept_len.stride(0), commit_len.stride(0), bonus.stride(0), out_tokens.stride(0), out_tokens.stride(1),
            finished.stride(0), batch, rows,
            P=config.requests, W=config.columns, num_warps=config.warps,
        )  # fmt: skip
