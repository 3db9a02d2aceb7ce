"""Verification of a draft: how many candidates the target keeps, and which tokens are emitted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmtp_kernels.ops.accept.op import ACCEPT_BLOCK, ACCEPT_PREFIX, ACCEPT_REJECTION

RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Values of `finished`: not finished, ended by a stop token, ended by the token budget."""

NAN_LOGITS, UNDECIDED, BAD_PARAMETER, BAD_DRAFT = 1, 2, 4, 8
"""Bits of `SampledAcceptance.status`."""


class Acceptance(NamedTuple):
    """What one verification decided, per request."""

    accept_len: torch.Tensor  # [B] int32
    commit_len: torch.Tensor  # [B] int32
    bonus: torch.Tensor  # [B] int64
    out_tokens: torch.Tensor  # [B, R] int64
    finished: torch.Tensor  # [B] int32


class SampledAcceptance(NamedTuple):
    """`Acceptance` and what was wrong with the rows it was decided from."""

    accept_len: torch.Tensor  # [B] int32
    commit_len: torch.Tensor  # [B] int32
    bonus: torch.Tensor  # [B] int64
    out_tokens: torch.Tensor  # [B, R] int64
    finished: torch.Tensor  # [B] int32
    status: torch.Tensor  # [B] int32


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
        `Acceptance`. `accept_len` m is the raw count of matching candidates, before stop tokens and budget (the
        histogram's bucket). `out_tokens[b, :commit_len]` are the emitted tokens, -1 after them: the accepted prefix
        plus the correction or bonus, cut after the first stop token and at the budget (`commit_len = min(m + 1, budget,
        stop_index + 1)`). `bonus` is the last emitted token, the next anchor (-1 when nothing was emitted).
        `finished` is 0 running, 1 a stop token was emitted, 2 the budget is used up; a stop wins over the budget. An
        inert row gives m = 0, c = 0, bonus -1 and keeps 0. A negative target id (a row the target could not decide)
        ends the prefix and is never emitted.

    Raises:
        ValueError, TypeError: a shape, dtype or device is wrong; the message names the argument.

    Source: target-only verification, section 5 of the DMTP description; stop and budget rules in README.md.
    """
    return Acceptance(*ACCEPT_PREFIX.call(candidates, target, stop_ids, budget, num_candidates))


def accept_rejection(
    candidates: torch.Tensor,
    target_logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    num_candidates: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
) -> SampledAcceptance:
    """Speculative rejection sampling: emitted tokens are distributed exactly as the target's own samples.

    Candidate d of row j is kept with probability min(1, p_j(d) / q_j(d)); the first one refused is replaced by a draw
    from max(p_j - q_j, 0), and after the last one a bonus is drawn from p. p is the target's distribution after
    temperature, top-k and top-p.

    Args:
        candidates, stop_ids, budget, num_candidates: as in `accept_prefix`. A candidate outside 0..V-1 counts as not
            proposed, and so do those after it.
        target_logits: `[B, R, V]` float, row j after the prefix `candidates[b, :j + 1]`.
        draft_probs: `[B, K, V]` float, `draft_probs[b, j]` is what `candidates[b, j + 1]` was drawn from, normalised
            here; `[B, K, N]` with `draft_ids`. None: the draft is deterministic (one-hot).
        draft_ids: `[B, K, N]` int32/int64, the ids that `draft_probs` belongs to; other ids have probability 0.
            Negative entries are padding whose probability is not used; an id listed twice has the sum of both.
        temperature: `[B]` float. 0 is greedy: the candidate must equal the lowest largest id; no random number is used.
        seed: `[B]` int32/int64.
        position: `[B]` int32/int64, the anchor's position (that of row 0's token, `context_len` of `advance_round`).
            All draws of the round are keyed by it, so it must differ from round to round.
        top_k, top_p: `[B]`, as in `sample_rows`.

    Returns:
        `SampledAcceptance`: as `Acceptance`, plus `status` bits of the rows the decision used (0..accept_len): 1, a
        NaN in the logits; 2, the row decides nothing (nothing above -inf; when sampling also any NaN or +inf), so the
        prefix ends there and no token is emitted for it; 4, bad temperature (negative, NaN, infinite) or NaN `top_p`
        of a sampled request: inert; 8, the draft's probabilities (NaN, negative, infinite, sum 0, or an id >= V) could
        not be used, so its candidate counts as not proposed.

    Raises:
        ValueError, TypeError: a shape, dtype or device is wrong; the message names the argument.

    Source: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", 2023.
    """
    inputs = (candidates, target_logits, temperature, seed, position, stop_ids, budget)
    return SampledAcceptance(*ACCEPT_REJECTION.call(*inputs, draft_probs, num_candidates, top_k, top_p, draft_ids))


def accept_block(
    candidates: torch.Tensor,
    target_logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    num_candidates: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
) -> SampledAcceptance:
    """Block verification: the target's distribution like `accept_rejection`, accepting at least as many on average.

    Arguments and result as in `accept_rejection`, but `draft_probs` is required: the rule weighs whole prefixes by the
    product of their ratios and is not valid without q. Drafts must be drawn with keys that no later round repeats
    (`philox.round_position`), because which prefix is kept depends on the candidates after it.

    Raises:
        ValueError, TypeError: `draft_probs` is None, or a shape, dtype or device is wrong; the message names the
            argument.

    Source: Sun et al., "Block verification accelerates speculative decoding", ICLR 2025 (arXiv 2403.10444).
    """
    inputs = (candidates, target_logits, temperature, seed, position, stop_ids, budget)
    return SampledAcceptance(*ACCEPT_BLOCK.call(*inputs, draft_probs, num_candidates, top_k, top_p, draft_ids))
