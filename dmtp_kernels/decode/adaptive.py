"""Several MTP candidates before the drafter continues: 1..n of them, chosen per request from its recent acceptance.

The block becomes `[A, T1..Ts, MASK...]` with s = `state.mtp_steps[b]`: MTP runs on its own predictions for T2..Tn, rows
take the first s - 1 of them, the drafter fills the rest. s follows from earlier rounds alone, so verification stays
lossless whatever it is. The host never reads it: every round runs n - 1 further MTP passes for all rows.
"""

from __future__ import annotations

import torch

from dmtp_kernels.decode.draw import draft_tokens
from dmtp_kernels.decode.forward import run_mtp, store
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import left

_WEIGHT = 0.25
"""Of the newest round in the running mean of accepted candidates. Not tuned."""


def chain_tokens(stack: Stack, state: BatchState, first: torch.Tensor, count: int) -> list[torch.Tensor]:
    """T2..T`count`, `[B, 1]` each, of the MTP module run on its own predictions from T1 `first[B, 1]` on; its rows use
    the scratch slots."""
    cache, index = stack.cache("mtp"), state.index
    tokens, hidden = [first], state.h_mtp
    every = torch.ones_like(state.length)
    for step in range(1, count):
        positions = index.positions[:, step - 1 : step]
        seen = state.tail_slots[:, :step]  # the pending row and the chain's earlier rows
        out = run_mtp(stack, tokens[-1], hidden[:, None], positions, state.mtp_table, index.history_len, seen)
        store(cache, out.rows, every, state.tail_slots[:, step : step + 1])
        hidden = out.hidden[:, 0]
        tokens.append(draft_tokens(stack, state, out.hidden, step))
    return tokens[1:]


def extend_block(stack: Stack, state: BatchState) -> None:
    """Put T2..Ts into the block of every row, and leave the chain in `state.work`."""
    work, known, more = state.work, stack.method.num_known, stack.mtp_steps - 1
    drawn = len(work.probabilities)
    chain = torch.cat(chain_tokens(stack, state, work.drafted[-1][:, -1:], stack.mtp_steps), dim=1)  # [B, n - 1]
    work.chain, work.chain_probabilities = chain, work.probabilities[drawn:]
    del work.probabilities[drawn:]
    ids, embeds = left(work.block_ids)[:, known : known + more], left(work.block_embeds)[:, known : known + more]
    # a token that MTP could not decide stays a MASK in the block
    slots = ids.shape[1]  # the last token of a long chain may have no slot
    chain = chain[:, :slots]
    used = taken_from_chain(stack, state)[:, :slots] & (chain >= 0)
    embedding = stack.target.embed_tokens.weight
    embeds.copy_(torch.where(used[:, :, None], embedding[chain.clamp(min=0)], embeds))
    ids.copy_(torch.where(used, chain, ids))


def merge_chain(stack: Stack, state: BatchState, tokens: torch.Tensor) -> torch.Tensor:
    """The drafter's `tokens[B, n]` for T2.., with the chain's in the place of the first s - 1; the same for what they
    were drawn from."""
    work, more = state.work, stack.mtp_steps - 1
    used, chain = taken_from_chain(stack, state), left(work.chain)
    if work.chain_probabilities:
        drafter = work.probabilities.pop()
        chained = torch.cat(work.chain_probabilities, dim=1)
        work.probabilities += [torch.where(used[:, :, None], chained, drafter[:, :more]), drafter[:, more:]]
    return torch.cat([torch.where(used, chain, tokens[:, :more]), tokens[:, more:]], dim=1)


def adapt(stack: Stack, state: BatchState) -> None:
    """Choose the next round's s: one more than the recent mean of accepted candidates, 1..n. Rows without tokens keep
    theirs."""
    accepted = left(state.work.accepted)
    moved = accepted.commit_len > 0
    mean = torch.lerp(state.recent, accepted.accept_len.to(state.recent.dtype), _WEIGHT)
    state.recent.copy_(torch.where(moved, mean, state.recent))
    state.mtp_steps.copy_((state.recent.floor() + 1).clamp(1, stack.mtp_steps))


def taken_from_chain(stack: Stack, state: BatchState) -> torch.Tensor:
    """`[B, n - 1]`: whether a row takes T2, T3, ... from the chain."""
    column = torch.arange(2, stack.mtp_steps + 1, device=state.mtp_steps.device)
    return column <= state.mtp_steps[:, None]
