"""Prefill in chunks: all three caches, the first token, and the pending MTP row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dmtp_kernels.decode.caches import slots_of
from dmtp_kernels.decode.forward import drafter_context, run_mtp, run_target, store
from dmtp_kernels.decode.round import advance_by, refresh
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import MTPPass
from dmtp_kernels.ops.accept import Acceptance, accept_prefix
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.sample import sample_rows


def prefill(
    stack: Stack,
    state: BatchState,
    prompt: torch.Tensor,
    chunk: int,
    wanted: Callable[[], bool] = lambda: True,
) -> Acceptance | None:
    """Process `prompt[B, n]`, one prompt of n tokens per row of `state`, and emit the first tokens.

    Afterwards the target's cache and the drafter's context hold n rows, the MTP history n - 1, and the MTP row of the
    first emitted token is pending. MTP row p pairs the target's hidden of p with the token at p+1, so a chunk's last
    row takes the next chunk's first token, and the prompt's last row the token just drawn. The rows are ready for a
    round. `wanted` is asked after every chunk; once it says no, the rows are left as they are and None is returned.
    """
    batch, length = prompt.shape
    state.length.fill_(0)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        positions = torch.arange(start, stop, device=prompt.device).expand(batch, -1)
        ctx_len = torch.full_like(state.length, start)
        passed = run_target(stack, prompt[:, start:stop], positions, state.target_table, ctx_len)
        valid = torch.full_like(state.length, stop - start)
        if passed.rows.k:
            target = stack.target_cache
            store(target, passed.rows, valid, slots_of(state.target_table, positions, target.page_size))
        if stop == length:
            token = _first_token(stack, state, passed.hidden[:, -1], length)
            following = torch.cat([prompt[:, start + 1 :], token], dim=1)
        else:
            following = prompt[:, start + 1 : stop + 1]
        advanced = None
        if stack.mtp is not None:
            advanced = run_mtp(stack, following, passed.hidden, positions, state.mtp_table, ctx_len, None)
            _commit_mtp(stack, state, positions, valid, advanced, last=stop == length)
        if stack.drafter_cache is not None:
            hidden = advanced.hidden if advanced is not None else None
            context = drafter_context(stack, passed.features, hidden, positions)
            drafter = stack.drafter_cache
            store(drafter, context, valid, slots_of(state.drafter_table, positions, drafter.page_size))
        if not wanted():
            return None
    first = accept_prefix(token, token, stop_ids=state.stop_ids, budget=state.budget)
    state.length.fill_(length - 1)
    refresh(stack, state)
    advance_by(stack, state, first.commit_len, first.bonus, first.finished)
    return first


def _first_token(stack: Stack, state: BatchState, hidden: torch.Tensor, position: int) -> torch.Tensor:
    """`[B, 1]` target tokens after `hidden[B, H]`, for `position`."""
    token, _ = sample_rows(
        stack.target.logits(hidden),
        temperature=state.temperature,
        seed=state.seed,
        position=torch.full_like(state.seed, position),
        top_k=state.top_k,
        top_p=state.top_p,
    )
    return token[:, None]


def _commit_mtp(
    stack: Stack, state: BatchState, positions: torch.Tensor, valid: torch.Tensor, advanced: MTPPass, *, last: bool
) -> None:
    cache = stack.mtp_cache
    assert cache is not None
    slots = slots_of(state.mtp_table, positions, cache.page_size)
    if not last:
        store(cache, advanced.rows, valid, slots)
        return
    commit_kv(
        advanced.rows.k,
        advanced.rows.v,
        cache.flat_k,
        cache.flat_v,
        valid,
        slots,
        pending_slot=state.tail_slots[:, 0],
        promote_dst=torch.full_like(valid, -1),
        hidden=advanced.hidden,
        next_hidden=state.h_mtp,
    )
