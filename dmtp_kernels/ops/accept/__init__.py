"""Verification of a draft: how many candidates the target keeps, and which tokens are emitted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmtp_kernels.ops.accept.op import ACCEPT_PREFIX

RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Values of `finished`: not finished, ended by a stop token, ended by the token budget."""


class Acceptance(NamedTuple):
    """What one verification decided, per request."""

    accept_len: torch.Tensor  # [B] int32
    commit_len: torch.Tensor  # [B] int32
    bonus: torch.Tensor  # [B] int64
    out_tokens: torch.Tensor  # [B, R] int64
    finished: torch.Tensor  # [B] int32


def accept_prefix(
    candidates: torch.Tensor,
    target: torch.Tensor,
    *,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    num_candidates: torch.Tensor | None = None,
) -> Acceptance:
    """Target-only verification: keep the longest prefix of candidates that equals the target's own tokens.

    Args:
        candidates: `[B, R]` int32/int64, the verify rows `[A, T1..TK]`, R = K + 1.
        target: `[B, R]` int32/int64, the target's token after each row; `target[b, j]` judges `candidates[b, j + 1]`.
        stop_ids: `[B, E]` or `[E]` int32/int64, tokens that end a request (E may be 0; negative entries never match).
        budget: `[B]` int32/int64, tokens the request may still emit. A row with budget <= 0 is inert.
        num_candidates: `[B]` int32/int64, how many of the K candidates were really proposed (default: all). Values are
            clamped to 0..K; a row with a negative value is inert.

    Returns:
        `Acceptance`. `accept_len` m is the raw count of matching candidates, before stop tokens and budget (the histogram's
        bucket). `out_tokens[b, :commit_len]` are the emitted tokens, -1 after them: the accepted prefix plus the
        correction or bonus, cut after the first stop token and at the budget (`commit_len = min(m + 1, budget,
        stop_index + 1)`). `bonus` is the last emitted token, the next anchor (-1 when nothing was emitted). `finished` is 0
        running, 1 a stop token was emitted, 2 the budget is used up; a stop wins over the budget. An inert row gives
        m = 0, c = 0, bonus -1 and keeps 0. A negative target id (a row the target could not decide) ends the prefix and is
        never emitted.

    Raises:
        ValueError, TypeError: a shape, dtype or device is wrong; the message names the argument.

    Source: target-only verification, section 5 of the DMTP description; stop and budget rules in README.md beside this file.
    """
    return Acceptance(*ACCEPT_PREFIX.functional(candidates, target, stop_ids, budget, num_candidates))
