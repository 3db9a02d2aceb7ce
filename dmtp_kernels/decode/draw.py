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
    token, weights = draw(stack, state, stack.target.logits(hidden), first)
    assert weights is not None
    state.work.probabilities.append(weights)
    return token


def draw(stack: Stack, state: BatchState, logits: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[B, n]` columns of `logits[B, n, V]`, of candidates `first`.. of the round, and the weights `[B, n, V]` that
    they were drawn with, not normalised; the best ones and None for target-only verification.

    A row without a number above -inf gives -1.
    """
    count, sampling = logits.shape[1], state.sampling
    row = torch.arange(first, first + count, device=logits.device)
    temperature, top_k, top_p, seed = (
        t[:, :count].flatten().contiguous()
        for t in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    )
    greedy = stack.verification == "target"
    if greedy:
        temperature = torch.zeros_like(temperature)
    rows = logits.flatten(0, 1)
    token, _ = sample_rows(
        rows,
        temperature=temperature,
        seed=seed,
        position=round_position(state.index.context_len[:, None], row).flatten(),
        top_k=None if greedy else top_k,
        top_p=None if greedy else top_p,
        stream=DRAFT,
    )
    token = token.view(logits.shape[:2])
    if greedy:
        return token, None
    decided = torch.where(rows.isnan(), -torch.inf, rows)
    weight = truncated(scaled(decided, temperature), decided, top_k, top_p)
    return token, weight.exp().float().view(logits.shape)
