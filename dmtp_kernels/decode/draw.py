"""Tokens of a draft and of the target: greedy, or drawn by (seed, position)."""

from __future__ import annotations

import torch

from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.ops.lm_head import key_token, lm_head_select
from dmtp_kernels.ops.sample import sample_rows
from dmtp_kernels.ops.sample.filters import scaled, truncated
from dmtp_kernels.ops.sample.philox import DRAFT, round_position


def target_tokens(stack: Stack, state: BatchState, hidden: torch.Tensor) -> torch.Tensor:
    """`[B, R]` target tokens after the verify rows `hidden[B, R, H]`; a draw depends on the request's seed and the
    position alone."""
    sampling = state.sampling
    token, _ = sample_rows(
        stack.target.logits(hidden).flatten(0, 1),
        temperature=sampling.temperature.flatten(),
        seed=sampling.seed.flatten(),
        position=state.index.token_positions.flatten(),
        top_k=sampling.top_k.flatten(),
        top_p=sampling.top_p.flatten(),
    )
    return token.view(hidden.shape[:2])


def draft_tokens(stack: Stack, state: BatchState, hidden: torch.Tensor, first: int) -> torch.Tensor:
    """`[B, n]` candidates `first`.. of the round, of drafted states `hidden[B, n, H]`.

    Greedy through the head op for target-only verification. Otherwise drawn like the target's, with keys that no
    other round has, and what they were drawn from is left in `state.work.probabilities`.
    """
    if stack.verification == "target":
        key, _ = lm_head_select(hidden.flatten(0, 1), stack.head)
        return key_token(key).view(hidden.shape[:2])
    count, sampling = hidden.shape[1], state.sampling
    row = torch.arange(first, first + count, device=hidden.device)
    temperature, top_k, top_p, seed = (
        t[:, :count].flatten().contiguous()
        for t in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    )
    logits = stack.target.logits(hidden).flatten(0, 1)
    token, _ = sample_rows(
        logits,
        temperature=temperature,
        seed=seed,
        position=round_position(state.index.context_len[:, None], row).flatten(),
        top_k=top_k,
        top_p=top_p,
        stream=DRAFT,
    )
    decided = torch.where(logits.isnan(), -torch.inf, logits)
    weight = truncated(scaled(decided, temperature), decided, top_k, top_p)
    state.work.probabilities.append(weight.exp().float().view(*hidden.shape[:2], -1))
    return token.view(hidden.shape[:2])
