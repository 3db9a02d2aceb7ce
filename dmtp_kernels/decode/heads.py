"""What turns a drafter's slots into candidates: each slot's best alone, or a walk in which a token depends on the one
before it.

A walk goes over the slots in order, with fixed shapes and no look from the host. Every token is drawn from a
distribution that its predecessors determine and that verification is told, so a walk changes acceptance, never the
output's law.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dmtp_kernels.decode.adaptive import taken_from_chain
from dmtp_kernels.decode.draw import draft_tokens, draw
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import left
from dmtp_kernels.models.selector import CandidateSelector
from dmtp_kernels.ops.lm_head import LMHead, decode_key, lm_head_select

Score = Callable[[int, torch.Tensor], torch.Tensor]
"""`score(slot, previous[B]) -> [B, W]`: logits over the vocabulary, or over the slot's shortlist, after a token."""
Choose = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None]]
"""`choose(scores[B, W], slot) -> (index[B], weights[B, 1, W] or None)`."""


def draft_slots(stack: Stack, state: BatchState, hidden: torch.Tensor, first: int) -> torch.Tensor:
    """`[B, n]` candidates `first`.. of the round, of the slots `hidden[B, n, H]` that predict them.

    What they were drawn from is left in `state.work`, as by `draft_tokens`.
    """
    assert stack.drafter is not None
    heads = stack.drafter.config.heads
    return (HEADS[heads[0]] if heads else draft_tokens)(stack, state, hidden, first)


def select_path(stack: Stack, state: BatchState, hidden: torch.Tensor, first: int) -> torch.Tensor:
    """DFlash2: of every slot's best tokens the one that fits its predecessor, which for the first slot is the last
    token known: A, or T1."""
    assert stack.drafter is not None
    selector = stack.drafter.candidate_selector
    ids, unary = shortlist(selector, stack.head, hidden)

    def score(slot: int, previous: torch.Tensor) -> torch.Tensor:
        return selector.scores(unary[:, slot], hidden[:, slot], previous, ids[:, slot].clamp(min=0))

    return _walk(stack, state, first, hidden.shape[1], score, ids)[0]


def shortlist(selector: CandidateSelector, head: LMHead, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` best tokens `[B, n, N]` of slots `hidden[B, n, H]`, in ascending order so that ties go to the lowest
    id, and their unary scores in fp32. Where fewer have a logit: -1 and -inf."""
    key, _ = lm_head_select(hidden.flatten(0, 1), head, k=selector.config.top_k)
    ids, logits = decode_key(key)
    ids, order = ids.sort(dim=1)
    unary = selector.unary(logits[torch.arange(len(order), device=order.device)[:, None], order])
    shape = (*hidden.shape[:2], -1)
    return ids.view(shape), torch.where(ids < 0, -torch.inf, unary).view(shape)


def follow_previous(stack: Stack, state: BatchState, hidden: torch.Tensor, first: int) -> torch.Tensor:
    """DSpark: every slot's logits with the bias of the token before it.

    Where the drafter knows its confidence, the round judges no candidate after the one at which the chance of getting
    that far falls below the configured cut. A candidate's confidence depends on those before it alone, not on itself.
    """
    assert stack.drafter is not None and stack.drafter.config.markov is not None
    drafter, config = stack.drafter, stack.drafter.config.markov
    logits = stack.target.logits(hidden)
    valid = logits.shape[2]

    def score(slot: int, previous: torch.Tensor) -> torch.Tensor:
        return logits[:, slot] + drafter.markov_head(previous)[:, :valid]

    tokens, before = _walk(stack, state, first, hidden.shape[1], score)
    if config.confidence:
        chance = drafter.confidence_head(hidden, drafter.markov_head.markov_w1(before)).sigmoid()
        if stack.mtp_steps > 1:
            # the drafter says nothing about MTP's own tokens
            taken = taken_from_chain(stack, state)[:, : chance.shape[1]]
            chance = torch.cat(
                [chance[:, : taken.shape[1]].masked_fill(taken, 1.0), chance[:, taken.shape[1] :]], dim=1
            )
        judged = first + (chance.cumprod(dim=1) >= config.cut).sum(dim=1)
        state.work.num_candidates = torch.minimum(state.num_candidates, judged)
    return tokens


def follow_prefix(stack: Stack, state: BatchState, hidden: torch.Tensor, first: int) -> torch.Tensor:
    """Domino: every slot's logits, corrected by a recurrent state over the round's tokens before it."""
    assert stack.drafter is not None
    head, embedding = stack.drafter.logit_head, stack.target.embed_tokens.weight
    logits = stack.target.logits(hidden)
    valid = logits.shape[2]
    known = torch.cat(state.work.drafted, dim=1).clamp(min=0)  # A, or A and T1
    prefix = head.start(hidden[:, 0])
    for column in range(known.shape[1] - 1):
        prefix = head.prefix_gru(embedding[known[:, column]], prefix)

    def score(slot: int, previous: torch.Tensor) -> torch.Tensor:
        nonlocal prefix
        prefix = head.prefix_gru(embedding[previous], prefix)
        if first + slot < head.config.pure:
            return logits[:, slot]
        return logits[:, slot] + head(hidden[:, slot], prefix)[:, :valid]

    return _walk(stack, state, first, hidden.shape[1], score)[0]


HEADS: dict[str, Callable[[Stack, BatchState, torch.Tensor, int], torch.Tensor]] = {
    "selector": select_path,
    "markov": follow_previous,
    "recurrent": follow_prefix,
}
"""Walks by the part of the drafter's configuration that they belong to."""


def walk(
    previous: torch.Tensor,
    count: int,
    score: Score,
    choose: Choose,
    ids: torch.Tensor | None = None,
    given: Callable[[int, torch.Tensor], torch.Tensor] = lambda slot, token: token,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens `[B, count]` of slots in order after the tokens `previous[B]`, the tokens `[B, count]` that each followed,
    and the weights that `choose` returned.

    Where scores belong to shortlists `ids[B, count, N]`, so do the indices chosen. `given(slot, token[B])` is the token
    that the next slot follows, where it is not the one chosen.
    """
    tokens, before, weights = [], [], []
    for slot in range(count):
        # a token that could not be decided is nobody's: any row of a table will do
        before.append(previous.clamp(min=0))
        index, drawn_with = choose(score(slot, before[-1]), slot)
        token = index if ids is None else _listed(ids[:, slot], index)
        tokens.append(token)
        previous = given(slot, token)
        if drawn_with is not None:
            weights.append(drawn_with)
    return torch.stack(tokens, dim=1), torch.stack(before, dim=1), weights


def _listed(ids: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`[B]` entries `index[B]` of `ids[B, N]`; -1 for an index of -1."""
    return torch.where(index < 0, -1, ids[torch.arange(len(ids), device=ids.device), index.clamp(min=0)])


def _walk(
    stack: Stack, state: BatchState, first: int, count: int, score: Score, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates `first`.. of the round, `[B, count]`, by `walk` from the last token known, A or T1; and the tokens
    that each followed."""
    work = state.work

    def choose(logits: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        index, weights = draw(stack, state, logits[:, None], first + slot)
        return index[:, 0], weights

    def given(slot: int, token: torch.Tensor) -> torch.Tensor:
        if slot >= stack.mtp_steps - 1:
            return token
        # the candidate of this slot is MTP's where the row takes it
        return torch.where(taken_from_chain(stack, state)[:, slot], left(work.chain)[:, slot], token)

    tokens, before, weights = walk(work.drafted[-1][:, -1], count, score, choose, ids, given)
    if weights:
        _remember(stack, state, torch.cat(weights, dim=1), ids)
    return tokens, before


def _remember(stack: Stack, state: BatchState, weights: torch.Tensor, ids: torch.Tensor | None) -> None:
    """Leave `weights[B, n, W]` for the acceptance: over the shortlists alone where they cover all candidates."""
    work = state.work
    if ids is not None and not work.probabilities and stack.method.first == "drafter":
        work.draft_ids = ids
    elif ids is not None:
        listed_weights = torch.where(ids < 0, 0.0, weights)
        dense = weights.new_zeros(*ids.shape[:2], stack.target.config.num_valid)
        weights = dense.scatter_add(2, ids.clamp(min=0), listed_weights)
    work.probabilities.append(weights)
