"""One decoding round: MTP proposes T1, the drafter continues, the target verifies, every cache commits what was kept.

A round is its stages, in the order of `STAGES`; every `Method` runs through them and nothing here reads the device from
the host. A stage takes its input from the state and from `state.work`, and leaves its output there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dmtp_kernels.decode.adaptive import adapt, chain_tokens, extend_block, merge_chain
from dmtp_kernels.decode.draw import draft_tokens, target_tokens
from dmtp_kernels.decode.forward import drafter_context, run_drafter, run_mtp, run_target
from dmtp_kernels.decode.heads import draft_slots
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.ranges import ROUND, ranged
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import MTPPass, Rows, TargetPass, Work, left
from dmtp_kernels.ops.accept import Acceptance, accept_block, accept_prefix, accept_rejection
from dmtp_kernels.ops.commit_kv import commit_round
from dmtp_kernels.ops.t1_prep import fused_t1_prep

STAGES = ("t1", "draft", "verify", "accept", "mtp", "commit", "advance")
"""Names of the functions here that make a round, each `stage(stack, state) -> None`, in order."""


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
    result: RoundResult = ranged(ROUND, _decode_round, stack.method)(stack, state)
    return result


def _decode_round(stack: Stack, state: BatchState) -> RoundResult:
    draft = propose(stack, state)
    return RoundResult(draft, finish_round(stack, state))


def propose(stack: Stack, state: BatchState) -> Draft:
    """The stages up to the draft, and what they proposed; `state.work` goes on without it."""
    for name in STAGES[: STAGES.index("verify")]:
        stage(name, stack.method)(stack, state)
    work = state.work
    # the round overwrites the state's own ids and positions
    ids, positions = (None if t is None else t.clone() for t in (work.block_ids, work.block_positions))
    return Draft(left(work.candidates), ids, work.block_embeds, positions, work.block_hidden)


def finish_round(stack: Stack, state: BatchState) -> Acceptance:
    """The stages from the verification on, and what they kept."""
    for name in STAGES[STAGES.index("verify") :]:
        stage(name, stack.method)(stack, state)
    return left(state.work.accepted)


def stage(name: str, method: Method | None = None) -> Callable[[Stack, BatchState], None]:
    """The stage called `name`, in its range where somebody watches."""
    found: Callable[[Stack, BatchState], None] = ranged(name, globals()[name], method)
    return found


def refresh(stack: Stack, state: BatchState) -> None:
    """Bring what follows from the rows of `state` up to date, after the host wrote one: indices and sampling rows."""
    sampling = state.sampling
    sampling.temperature.copy_(state.temperature[:, None])
    sampling.top_k.copy_(state.top_k[:, None])
    sampling.top_p.copy_(state.top_p[:, None])
    sampling.seed.copy_(state.seed[:, None])
    advance_by(stack, state, state.idle, state.idle, state.idle)


def t1(stack: Stack, state: BatchState) -> None:
    """Select T1 where MTP proposes it, look up the block's embeddings, fuse."""
    work, method = Work(), stack.method
    state.work = work
    if method.chain:
        tokens = draft_tokens(stack, state, state.h_mtp[:, None], 0)
        work.drafted = [state.anchor[:, None], tokens]
    elif method.drafter is None:
        work.drafted = [state.anchor[:, None]]
    else:
        work.block_ids, work.block_embeds = prepare_block(stack, state)
        work.block_positions = block_positions(stack, state)
        ids = work.block_ids[:, : method.num_known]
        # the block's known ids are [A], [A, T1] or [T1]; candidates always start with A
        work.drafted = [ids] if method.block_has_anchor else [state.anchor[:, None], ids]


def prepare_block(stack: Stack, state: BatchState) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and embeddings of the drafter's slots, T1 selected and fused where the method has it."""
    assert stack.drafter is not None
    config = stack.drafter.config
    embedding = stack.target.embed_tokens.weight
    if stack.method.first == "drafter":
        ids = state.index.block_ids
        return ids, embedding[ids]
    greedy = stack.verification == "target"
    _, ids, embeds, _ = fused_t1_prep(
        state.anchor,
        state.h_mtp,
        stack.head if greedy else None,
        embedding,
        stack.fusion,
        anchors=stack.method.anchors,
        mask_id=config.mask_token_id,
        num_masks=config.block_size - 2,
        t1_override=None if greedy else draft_tokens(stack, state, state.h_mtp[:, None], 0)[:, 0],
    )
    return ids, embeds


def block_positions(stack: Stack, state: BatchState) -> torch.Tensor:
    """Absolute positions `[B, S]` of the drafter's slots: from the anchor's, or from T1's where the block starts with
    T1."""
    index = state.index
    return (index.positions if stack.method.block_has_anchor else index.token_positions)[:, : stack.method.num_slots]


def draft(stack: Stack, state: BatchState) -> None:
    """The candidates after T1: the drafter's slots, or MTP on its own predictions."""
    work, method = state.work, stack.method
    if method.chain:
        work.drafted += chain_tokens(stack, state, work.drafted[-1], method.chain)
    elif method.drafter is not None:
        if stack.mtp_steps > 1:
            extend_block(stack, state)
        embeds, positions = left(work.block_embeds), left(work.block_positions)
        hidden = run_drafter(stack, embeds, positions, state.drafter_table, state.index.context_len)
        work.block_hidden = hidden
        tokens = draft_slots(stack, state, hidden[:, method.predicting], method.num_candidates - method.num_drafted)
        work.drafted.append(merge_chain(stack, state, tokens) if stack.mtp_steps > 1 else tokens)
    padding = stack.rows - 1 - method.num_candidates
    work.drafted += [state.anchor[:, None]] * padding
    work.candidates = torch.cat(work.drafted, dim=1)


def verify(stack: Stack, state: BatchState) -> None:
    """Target over `[A, T1..TK]` at positions a..a+K, and its token after every row (or its logits)."""
    work = state.work
    ids = left(work.candidates).clamp(0, stack.target.config.vocab_size - 1)
    verified = run_target(stack, ids, state.index.positions, state.target_table, state.index.context_len)
    work.verified = verified
    if stack.verification == "target":
        work.target_tokens = target_tokens(stack, state, verified.hidden)
    else:
        work.logits = stack.target.logits(verified.hidden)


def accept(stack: Stack, state: BatchState) -> None:
    """Keep candidates, inside stop tokens, budget and the row's `num_candidates`."""
    work = state.work
    candidates = left(work.candidates)
    most = state.num_candidates if work.num_candidates is None else work.num_candidates
    limits = {"stop_ids": state.stop_ids, "budget": state.budget, "num_candidates": most}
    if stack.verification == "target":
        work.accepted = accept_prefix(candidates, left(work.target_tokens), **limits)
        return
    logits = left(work.logits)
    # padding rows were drawn from nothing
    padding = candidates.shape[1] - 1 - stack.method.num_candidates
    width = logits.shape[2] if work.draft_ids is None else work.draft_ids.shape[2]
    none = logits.new_zeros(len(logits), padding, width)
    rule = accept_rejection if stack.verification == "rejection" else accept_block
    kept = rule(
        candidates,
        logits,
        temperature=state.temperature,
        seed=state.seed,
        position=state.index.context_len,
        draft_probs=torch.cat([*work.probabilities, none], dim=1),
        draft_ids=work.draft_ids,
        top_k=state.top_k,
        top_p=state.top_p,
        **limits,
    )
    work.accepted = Acceptance(*kept[:-1])


def mtp(stack: Stack, state: BatchState) -> None:
    """MTP over the emitted tokens."""
    if stack.mtp is not None:
        state.work.advanced = advance_mtp(stack, state, left(state.work.accepted), left(state.work.verified))


def advance_mtp(stack: Stack, state: BatchState, accepted: Acceptance, verified: TargetPass) -> MTPPass:
    """MTP over R fixed rows: row j = (emitted token j, target hidden of position a+j); rows beyond the emitted are
    inert."""
    index, seen = state.index, state.tail_slots[:, :1]
    tokens, hidden = accepted.out_tokens, verified.hidden
    return run_mtp(stack, tokens, hidden, index.positions, state.mtp_table, index.history_len, seen)


def commit(stack: Stack, state: BatchState) -> None:
    """Write the rows of the committed tokens to every cache, one launch.

    MTP's pending row is promoted, its valid rows are placed, the rest goes to scratch, and the next predictor hidden is
    picked.
    """
    work, index = state.work, state.index
    verified, advanced = left(work.verified), work.advanced
    rows: list[Rows] = [verified.rows]
    mtp: dict[str, Any] = {}
    if stack.drafter is not None:
        mtp_hidden = advanced.hidden if advanced is not None else None
        rows.append(drafter_context(stack, verified.features, mtp_hidden, index.positions))
    if advanced is not None:
        rows.append(advanced.rows)
        mtp = {
            "pending_slot": state.tail_slots[:, 0],
            "promote_dst": index.previous_slots[:, -1],
            "scratch_dst": state.tail_slots[:, 1 : 1 + stack.rows],
            "hidden": advanced.hidden,
            "next_hidden": state.h_mtp,
        }
    # caches in the order of the rows, MTP's last
    caches = [stack.cache(owner) for owner in stack.owners]
    commit_round(
        [k for part in rows for k in part.k],
        [v for part in rows for v in part.v],
        [k for cache in caches for k in cache.flat_k],
        [v for cache in caches for v in cache.flat_v],
        left(work.accepted).commit_len,
        list(index.slots.unbind(1)),
        layers=[len(cache.flat_k) for cache in caches],
        **mtp,
    )


def advance(stack: Stack, state: BatchState) -> None:
    """Move every row past its committed tokens, enter granted pages, index the next round: one launch."""
    accepted = left(state.work.accepted)
    if stack.mtp_steps > 1:
        adapt(stack, state)
    advance_by(stack, state, accepted.commit_len, accepted.bonus, accepted.finished)


def advance_by(
    stack: Stack, state: BatchState, commit_len: torch.Tensor, bonus: torch.Tensor, ended: torch.Tensor
) -> None:
    """`advance_round` on `state`, in place."""
    torch.ops.dmtp.advance_round_out(
        state.length,
        state.anchor,
        state.budget,
        state.finished,
        commit_len,
        bonus,
        ended,
        [getattr(state, f"{owner}_table") for owner in stack.owners],
        page_sizes=[stack.cache(owner).page_size for owner in stack.owners],
        rows=stack.rows,
        grants=state.grants,
        block_slots=stack.known_slots,
        mask_id=stack.drafter.config.mask_token_id if stack.drafter is not None else 0,
        first_page=1,
        **state.index._asdict(),
    )
