"""Faults of vLLM that speculative decoding runs into, whatever drafts."""

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler

from dmtp_kernels.engines.vllm.switches import logger


def repair_sampling(device: torch.device) -> None:
    """Replace `rejection_sampler.expand_batch_to_tokens` where it leaves its result unwritten.

    In vLLM 0.32 on a CPU the kernel behind it writes to an int64 copy, so with any temperature the target's logits are
    divided by whatever lay in memory.
    """
    wanted = torch.tensor([0.25, 0.25, 0.75], device=device)
    counts = torch.tensor([2, 3], dtype=torch.int32, device=device)
    found = rejection_sampler.expand_batch_to_tokens(wanted[1:].clone(), counts, 3)
    if not torch.equal(found, wanted):
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        logger.warning("dmtp: vLLM's expand_batch_to_tokens leaves temperatures unwritten here; replaced")


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """`[num_tokens]`: entry b of `x[B]` for the tokens before `cu_num_tokens[b]`, `replace_from` in it replaced."""
    request = torch.searchsorted(cu_num_tokens, torch.arange(num_tokens, device=x.device), right=True)
    return torch.where(x == replace_from, replace_to, x)[request].to(x.dtype)
