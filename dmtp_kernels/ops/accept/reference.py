"""The acceptance rules in eager PyTorch: the definition every kernel must match."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dmtp_kernels.ops.accept import BAD_DRAFT, BAD_PARAMETER, LENGTH, NAN_LOGITS, RUNNING, STOPPED, UNDECIDED
from dmtp_kernels.ops.sample import philox
from dmtp_kernels.ops.sample.filters import lowest_argmax, race, scaled, truncated

Rule = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""`rule(p, q, drawn, u, usable)` -> candidates kept `[B]`, and the factor on p in the residual after them `[B]`."""


def accept_prefix(
    candidates: torch.Tensor,  # [B, R]
    target: torch.Tensor,  # [B, R]
    stop_ids: torch.Tensor,  # [B, E] or [E]
    budget: torch.Tensor,  # [B]
    num_candidates: torch.Tensor | None,  # [B]
    *outputs: torch.Tensor,
) -> None:
    limit = _limit(candidates, num_candidates)
    column = torch.arange(candidates.shape[1] - 1, device=candidates.device)
    match = (candidates[:, 1:] == target[:, :-1]) & (candidates[:, 1:] >= 0) & (column < limit[:, None])
    _emit(target, _prefix_length(match), limit >= 0, stop_ids, budget, *outputs)


def accept_rejection(*arguments: torch.Tensor | None) -> None:
    _accept_sampled(_token_rule, *arguments)  # type: ignore[arg-type]


def accept_block(*arguments: torch.Tensor | None) -> None:
    _accept_sampled(_block_rule, *arguments)  # type: ignore[arg-type]


def _accept_sampled(
    rule: Rule,
    candidates: torch.Tensor,  # [B, R]
    target_logits: torch.Tensor,  # [B, R, V]
    temperature: torch.Tensor,  # [B]
    seed: torch.Tensor,  # [B]
    position: torch.Tensor,  # [B]
    stop_ids: torch.Tensor,  # [B, E] or [E]
    budget: torch.Tensor,  # [B]
    draft_probs: torch.Tensor | None,  # [B, K, V], or [B, K, N] with draft_ids
    num_candidates: torch.Tensor | None,  # [B]
    top_k: torch.Tensor | None,  # [B]
    top_p: torch.Tensor | None,  # [B]
    draft_ids: torch.Tensor | None,  # [B, K, N]
    accept_len: torch.Tensor,  # [B] out
    commit_len: torch.Tensor,  # [B] out
    bonus: torch.Tensor,  # [B] out
    out_tokens: torch.Tensor,  # [B, R] out
    finished: torch.Tensor,  # [B] out
    status: torch.Tensor,  # [B] out
) -> None:
    batch, width, vocab = target_logits.shape
    column = torch.arange(width, device=candidates.device)
    greedy = temperature == 0
    bad = ~(temperature >= 0) | torch.isinf(temperature)
    if top_p is not None:
        bad |= top_p.isnan() & ~greedy
    limit = _limit(candidates, num_candidates)
    live = (limit >= 0) & ~bad

    nan = target_logits.isnan()
    x = torch.where(nan, -torch.inf, target_logits)
    has_nan = nan.any(dim=2)  # [B, R]
    empty = torch.isneginf(x).all(dim=2)
    undecided = torch.where(greedy[:, None], empty, empty | has_nan | torch.isposinf(x).any(dim=2))
    best = lowest_argmax(x.flatten(0, 1)).view(batch, width)
    p = _target_distribution(x, temperature, top_k, top_p)

    drawn = candidates[:, 1:].long()  # [B, K]
    proposed = (drawn >= 0) & (drawn < vocab) & (column[:-1] < limit[:, None])
    drawn = drawn.clamp(0, vocab - 1)
    q, bad_draft = _draft_distribution(draft_probs, draft_ids, drawn, vocab)
    bad_draft &= ~greedy[:, None]
    matched = _prefix_length(proposed & ~undecided[:, :-1] & (drawn == best[:, :-1]))
    usable = _prefix_length(proposed & ~undecided[:, :-1] & ~bad_draft)  # [B]
    u = philox.uniform(seed, position, philox.ACCEPT, width - 1)
    kept, scale = rule(p, q, drawn, u, usable)
    accepted = torch.where(greedy, matched, kept) * live

    row = accepted[:, None]
    residual = _residual(p, q, scale, accepted, usable)
    replacement = race(residual.log(), philox.exponential(seed, position, philox.RESIDUAL, vocab))
    correction = torch.where(greedy, best.gather(1, row)[:, 0], replacement)
    correction = torch.where(undecided.gather(1, row)[:, 0], -1, correction)
    following = torch.cat((drawn, drawn.new_zeros(batch, 1)), dim=1)
    target = torch.where(column < row, following, torch.where(column == row, correction[:, None], -1))
    _emit(target, accepted, live, stop_ids, budget, accept_len, commit_len, bonus, out_tokens, finished)

    used = column <= row
    flags = (has_nan & used).any(dim=1) * NAN_LOGITS + (undecided & used).any(dim=1) * UNDECIDED
    flags += (bad_draft & proposed & used[:, :-1]).any(dim=1) * BAD_DRAFT
    flags = torch.where(bad, BAD_PARAMETER, flags)
    status.copy_(torch.where((budget > 0) & (limit >= 0), flags, 0))


def _token_rule(
    p: torch.Tensor,  # [B, R, V]
    q: torch.Tensor,  # [B, K, V]
    drawn: torch.Tensor,  # [B, K]
    u: torch.Tensor,  # [B, K]
    usable: torch.Tensor,  # [B]
) -> tuple[torch.Tensor, torch.Tensor]:
    p_drawn, q_drawn = _of_drawn(p, q, drawn)
    column = torch.arange(drawn.shape[1], device=drawn.device)
    # no division: u < p / q; a candidate that q says cannot be drawn is refused
    keep = (u * q_drawn < p_drawn) & (q_drawn > 0) & (column < usable[:, None])
    return _prefix_length(keep), torch.ones_like(usable, dtype=torch.float64)


def _block_rule(
    p: torch.Tensor,  # [B, R, V]
    q: torch.Tensor,  # [B, K, V]
    drawn: torch.Tensor,  # [B, K]
    u: torch.Tensor,  # [B, K]
    usable: torch.Tensor,  # [B]
) -> tuple[torch.Tensor, torch.Tensor]:
    p_drawn, q_drawn = _of_drawn(p, q, drawn)
    ratio = torch.where(q_drawn > 0, p_drawn / torch.where(q_drawn > 0, q_drawn, 1.0), 0.0)
    weight = u.new_ones(len(u))
    kept, scale = torch.zeros_like(usable), weight
    for i in range(1, drawn.shape[1] + 1):
        weight = (weight * ratio[:, i - 1]).clamp(max=1.0)  # P_i
        chance = weight
        if i < drawn.shape[1]:
            surplus = (weight[:, None] * p[:, i] - q[:, i]).clamp(min=0.0).sum(dim=1)
            below = surplus + 1.0 - weight
            inner = torch.where(below > 0, surplus / torch.where(below > 0, below, 1.0), 1.0)
            chance = torch.where(usable == i, weight, inner)
        longer = (u[:, i - 1] < chance) & (i <= usable)
        kept = torch.where(longer, i, kept)
        scale = torch.where(longer, weight, scale)
    return kept, scale


def _residual(
    p: torch.Tensor,  # [B, R, V]
    q: torch.Tensor,  # [B, K, V]
    scale: torch.Tensor,  # [B]
    accepted: torch.Tensor,  # [B]
    usable: torch.Tensor,  # [B]
) -> torch.Tensor:
    """`[B, V]` weights of the token after the accepted prefix: p itself where nothing was refused."""
    batch = torch.arange(len(accepted), device=accepted.device)
    p_next = p[batch, accepted]
    if q.shape[1] == 0:
        return p_next
    surplus = scale[:, None] * p_next - q[batch, accepted.clamp(max=q.shape[1] - 1)]
    surplus = surplus.clamp(min=0.0)
    # rounding alone can refuse a candidate where p and q agree, and leave no surplus
    refused = (accepted < usable) & (surplus.sum(dim=1) > 0)
    return torch.where(refused[:, None], surplus, p_next)


def _target_distribution(
    x: torch.Tensor,  # [B, R, V] without NaN
    temperature: torch.Tensor,  # [B]
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """`[B, R, V]` float64 probabilities; rows that decide nothing are all 0."""
    width = x.shape[1]
    per_row = [None if t is None else t.repeat_interleave(width) for t in (temperature, top_k, top_p)]
    assert per_row[0] is not None
    rows = x.flatten(0, 1)
    mass = truncated(scaled(rows, per_row[0]), rows, per_row[1], per_row[2]).exp()
    total = mass.sum(dim=1, keepdim=True)
    return (mass / torch.where(total > 0, total, 1.0)).view(x.shape)


def _draft_distribution(
    draft_probs: torch.Tensor | None,  # [B, K, V], or [B, K, N] with draft_ids
    draft_ids: torch.Tensor | None,  # [B, K, N]
    drawn: torch.Tensor,  # [B, K]
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, K, V]` float64 probabilities the candidates were drawn from, and which rows `[B, K]` are no distribution."""
    q = torch.zeros(*drawn.shape, vocab, dtype=torch.float64, device=drawn.device)
    if draft_probs is None:
        return q.scatter_(2, drawn[:, :, None], 1.0), torch.zeros_like(drawn, dtype=torch.bool)
    given = draft_probs.double()
    if draft_ids is not None:
        ids = draft_ids.long()
        # an id outside the vocabulary makes the sum no number
        given = torch.where(ids >= 0, torch.where(ids < vocab, given, torch.nan), 0.0)
        q.scatter_add_(2, ids.clamp(0, vocab - 1), given)
    else:
        q = given
    total = given.sum(dim=2)
    bad = ~(torch.isfinite(total) & (total > 0)) | (given < 0).any(dim=2)
    return torch.where(bad[:, :, None], 0.0, q / torch.where(bad, 1.0, total)[:, :, None]), bad


def _of_drawn(p: torch.Tensor, q: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = drawn[:, :, None]
    return p[:, :-1].gather(2, index)[:, :, 0], q.gather(2, index)[:, :, 0]  # [B, K] each


def _limit(candidates: torch.Tensor, num_candidates: torch.Tensor | None) -> torch.Tensor:
    """`[B]` int64 candidates really proposed; negative for inert rows."""
    if num_candidates is None:
        return torch.full((candidates.shape[0],), candidates.shape[1] - 1, device=candidates.device)
    return num_candidates.long()


def _prefix_length(keep: torch.Tensor) -> torch.Tensor:
    return keep.long().cumprod(dim=1).sum(dim=1)


def _emit(
    target: torch.Tensor,  # [B, R] the tokens after each row; rows beyond the accepted prefix's next are not looked at
    accepted: torch.Tensor,  # [B]
    live: torch.Tensor,  # [B]
    stop_ids: torch.Tensor,  # [B, E] or [E]
    budget: torch.Tensor,  # [B]
    accept_len: torch.Tensor,
    commit_len: torch.Tensor,
    bonus: torch.Tensor,
    out_tokens: torch.Tensor,
    finished: torch.Tensor,
) -> None:
    """Cut the accepted prefix and its next token at the first stop token and at the budget."""
    column = torch.arange(target.shape[1], device=target.device)
    live = live & (budget > 0)
    accepted = accepted * live
    stops = stop_ids if stop_ids.dim() == 1 else stop_ids[:, None, :]
    is_stop = (target[:, :, None] == stops).any(dim=2) & (target >= 0)  # [B, R]
    stopped_before = is_stop.long().cumsum(dim=1) - is_stop.long() > 0
    # row j < m of the target equals candidate j + 1; row m is the correction or bonus
    valid = (column <= accepted[:, None]) & (target >= 0) & live[:, None]
    count = _prefix_length(valid & (column < budget[:, None]) & ~stopped_before)  # [B]

    emitted = column < count[:, None]
    last = (count - 1).clamp(min=0)[:, None]
    accept_len.copy_(accepted)
    commit_len.copy_(count)
    out_tokens.copy_(torch.where(emitted, target.long(), -1))
    bonus.copy_(torch.where(count > 0, target.gather(1, last)[:, 0].long(), -1))
    stopped = (is_stop & emitted).any(dim=1)
    finished.copy_(torch.where(stopped, STOPPED, torch.where(live & (count >= budget), LENGTH, RUNNING)))
