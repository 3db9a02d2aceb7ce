"""One decoding round: MTP proposes T1, the drafter continues, the target verifies, every cache commits what was kept.

Every `Method` runs through `decode_round`; nothing here reads the device from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.decode.caches import slots_of
from dmtp_kernels.decode.forward import MTPPass, TargetPass, drafter_context, run_drafter, run_mtp, run_target, store
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.ops.accept import Acceptance, accept_prefix
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.lm_head import decode_key, lm_head_select
from dmtp_kernels.ops.sample import sample_rows
from dmtp_kernels.ops.t1_prep import fused_t1_prep


@dataclass
class Draft:
    """What was proposed: `candidates[B, R]` = `[A, T1..TK]`, padding rows after them.

    The block fields are None for methods without a drafter: `block_ids[B, S]`, `block_embeds[B, S, H]`,
    `block_positions[B, S]` and the drafter's `block_hidden[B, S, H]`.
    """

    candidates: torch.Tensor
    block_ids: torch.Tensor | None = None
    block_embeds: torch.Tensor | None = None
    block_positions: torch.Tensor | None = None
    block_hidden: torch.Tensor | None = None


@dataclass
class RoundResult:
    """Device-side outcome of one round; the host reads it one round later."""

    draft: Draft
    accepted: Acceptance


def decode_round(stack: Stack, state: BatchState) -> RoundResult:
    """Run one round over all rows of `state` (a view on the live rows) and advance it in place."""
    return finish_round(stack, state, propose(stack, state))


def finish_round(stack: Stack, state: BatchState, draft: Draft, limit: int | None = None) -> RoundResult:
    """Verify a draft, keep at most `limit` candidates, and advance the state past what was emitted."""
    verified = verify(stack, state, draft.candidates)
    accepted = accept(stack, state, draft.candidates, verified, limit)
    advanced = advance_mtp(stack, state, accepted, verified) if stack.mtp is not None else None
    commit(stack, state, accepted, verified, advanced)
    state.advance(accepted)
    return RoundResult(draft, accepted)


def propose(stack: Stack, state: BatchState) -> Draft:
    """The candidates of one round."""
    method = stack.method
    if method.chain:
        tokens = propose_chain(stack, state)
        return Draft(_with_padding(stack, torch.cat([state.anchor[:, None], tokens], dim=1)))
    if method.drafter is None:
        return Draft(_with_padding(stack, state.anchor[:, None].clone()))  # not a view: the anchor moves on
    ids, embeds = prepare_block(stack, state)
    positions = block_positions(stack, state)
    hidden = run_drafter(stack, embeds, positions, state.drafter_table, state.length)
    known = method.num_known
    tokens = greedy_tokens(stack, hidden[:, known:])
    # the block's known ids are [A], [A, T1] or [T1]; candidates always start with A
    head = ids[:, :known] if method.block_has_anchor else torch.cat([state.anchor[:, None], ids[:, :1]], dim=1)
    return Draft(_with_padding(stack, torch.cat([head, tokens], dim=1)), ids, embeds, positions, hidden)


def prepare_block(stack: Stack, state: BatchState) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and embeddings of the drafter's slots, T1 selected and fused where the method has it."""
    assert stack.drafter is not None
    config = stack.drafter.config
    embedding = stack.target.embed_tokens.weight
    if stack.method.first == "drafter":
        masks = state.anchor.new_full((1,), config.mask_token_id).expand(state.anchor.shape[0], config.block_size - 1)
        ids = torch.cat([state.anchor[:, None], masks], dim=1)
        return ids, embedding[ids]
    _, ids, embeds, _ = fused_t1_prep(
        state.anchor,
        state.h_mtp,
        stack.head,
        embedding,
        stack.fusion,
        anchors=stack.method.anchors,
        mask_id=config.mask_token_id,
        num_masks=config.block_size - 2,
    )
    return ids, embeds


def block_positions(stack: Stack, state: BatchState) -> torch.Tensor:
    """Absolute positions `[B, S]` of the drafter's slots: from the anchor's, or from T1's where the block starts with
    T1."""
    first = state.length if stack.method.block_has_anchor else state.length + 1
    return first[:, None] + torch.arange(stack.method.num_slots, device=first.device)


def propose_chain(stack: Stack, state: BatchState) -> torch.Tensor:
    """`[B, chain]` tokens of the MTP module run on its own predictions; its rows use the scratch slots."""
    assert stack.mtp_cache is not None
    hidden = state.h_mtp
    tokens = [greedy_tokens(stack, hidden[:, None])]
    every = torch.ones_like(state.length)
    for step in range(1, stack.method.chain):
        positions = (state.length + step - 1)[:, None]
        seen = state.tail_slots[:, :step]  # the pending row and the chain's earlier rows
        out = run_mtp(stack, tokens[-1], hidden[:, None], positions, state.mtp_table, state.length - 1, seen)
        store(stack.mtp_cache, out.rows, every, state.tail_slots[:, step : step + 1])
        hidden = out.hidden[:, 0]
        tokens.append(greedy_tokens(stack, out.hidden))
    return torch.cat(tokens, dim=1)


def verify(stack: Stack, state: BatchState, candidates: torch.Tensor) -> TargetPass:
    """Target over `[A, T1..TK]` at positions a..a+K."""
    positions = row_positions(state, candidates.shape[1])
    return run_target(stack, candidates.clamp(min=0), positions, state.target_table, state.length)


def accept(
    stack: Stack, state: BatchState, candidates: torch.Tensor, verified: TargetPass, limit: int | None = None
) -> Acceptance:
    """Draw the target's token after every row and keep the matching prefix, inside stop tokens and budget.

    At most `limit` candidates are considered (default: all of the method's).
    """
    tokens = sample_tokens(stack, state, verified.hidden, row_positions(state, candidates.shape[1]) + 1)
    count = torch.full_like(state.length, stack.method.num_candidates if limit is None else limit)
    return accept_prefix(candidates, tokens, stop_ids=state.stop_ids, budget=state.budget, num_candidates=count)


def advance_mtp(stack: Stack, state: BatchState, accepted: Acceptance, verified: TargetPass) -> MTPPass:
    """MTP over R fixed rows: row j = (emitted token j, target hidden of position a+j); rows beyond the emitted are
    inert."""
    width = accepted.out_tokens.shape[1]
    return run_mtp(
        stack,
        accepted.out_tokens,
        verified.hidden,
        row_positions(state, width),
        state.mtp_table,
        state.length - 1,
        state.tail_slots[:, :1],
    )


def commit(
    stack: Stack, state: BatchState, accepted: Acceptance, verified: TargetPass, advanced: MTPPass | None
) -> None:
    """Write the rows of the committed tokens to the three caches."""
    positions = row_positions(state, accepted.out_tokens.shape[1])
    valid = accepted.commit_len
    target = stack.target_cache
    store(target, verified.rows, valid, slots_of(state.target_table, positions, target.page_size))
    if stack.drafter_cache is not None:
        mtp_hidden = advanced.hidden if advanced is not None else None
        context = drafter_context(stack, verified.features, mtp_hidden, positions)
        drafter = stack.drafter_cache
        store(drafter, context, valid, slots_of(state.drafter_table, positions, drafter.page_size))
    if advanced is not None:
        commit_mtp(stack, state, valid, positions, advanced)


def commit_mtp(
    stack: Stack, state: BatchState, valid: torch.Tensor, positions: torch.Tensor, advanced: MTPPass
) -> None:
    """Promote the pending row, place the valid ones, leave the rest in scratch, pick the next predictor hidden."""
    cache = stack.mtp_cache
    assert cache is not None
    commit_kv(
        advanced.rows.k,
        advanced.rows.v,
        cache.flat_k,
        cache.flat_v,
        valid,
        slots_of(state.mtp_table, positions, cache.page_size),
        pending_slot=state.tail_slots[:, 0],
        promote_dst=slots_of(state.mtp_table, state.length[:, None] - 1, cache.page_size)[:, 0],
        scratch_dst=state.tail_slots[:, 1 : 1 + positions.shape[1]],
        hidden=advanced.hidden,
        next_hidden=state.h_mtp,
    )


def row_positions(state: BatchState, width: int) -> torch.Tensor:
    """`[B, width]` absolute positions a..a+width-1."""
    return state.length[:, None] + torch.arange(width, device=state.length.device)


def greedy_tokens(stack: Stack, hidden: torch.Tensor) -> torch.Tensor:
    """`[B, T]` greedy tokens of drafted states `hidden[B, T, H]`, through the head op."""
    key, _ = lm_head_select(hidden.flatten(0, 1), stack.head)
    return decode_key(key)[0].reshape(hidden.shape[:2])


def sample_tokens(stack: Stack, state: BatchState, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`[B, T]` target tokens for `positions[B, T]`; the draw depends on the request's seed and the position alone."""
    width = hidden.shape[1]
    token, _ = sample_rows(
        stack.target.logits(hidden).flatten(0, 1),
        temperature=state.temperature.repeat_interleave(width),
        seed=state.seed.repeat_interleave(width),
        position=positions.flatten(),
        top_k=state.top_k.repeat_interleave(width),
        top_p=state.top_p.repeat_interleave(width),
    )
    return token.reshape(hidden.shape[:2])


def _with_padding(stack: Stack, candidates: torch.Tensor) -> torch.Tensor:
    padding = stack.rows - candidates.shape[1]
    if padding == 0:
        return candidates
    return torch.cat([candidates, candidates[:, :1].expand(-1, padding)], dim=1)
