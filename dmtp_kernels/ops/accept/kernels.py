"""Triton kernels that every acceptance rule ends with: the cut at stop tokens and the budget."""

from __future__ import annotations

import triton
import triton.language as tl

_RUNNING, _STOPPED, _LENGTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def emit(
    target, accepted, live, known, request,  # [P, W] tokens int64, [P], [P], [P] inside the batch, [P]
    stop_ptr, stop_stride, num_stop,  # [B, E], stride 0 for one list
    budget_ptr,  # [B]
    accept_ptr, commit_ptr, bonus_ptr, out_ptr, finished_ptr,
    accept_stride, commit_stride, bonus_stride, out_stride, out_column_stride, finished_stride,
    rows, W: tl.constexpr,
):  # fmt: skip
    """Write what the accepted prefix and its next token (row `accepted` of `target`) become."""
    column = tl.arange(0, W)[None, :]
    budget = tl.load(budget_ptr + request, mask=known, other=0).to(tl.int64)
    live = live & (budget > 0)
    accepted = tl.where(live, accepted, 0)
    stop = target < -1  # all false
    for i in range(num_stop):
        wanted = tl.load(stop_ptr + request * stop_stride + i, mask=known, other=-1).to(tl.int64)
        stop = stop | (target == wanted[:, None])
    stop = stop & (target >= 0)
    inside = (column <= accepted[:, None]) & (target >= 0) & live[:, None] & (column < budget[:, None])
    # the first row that is not emitted: not inside, or behind a stop
    ends = tl.minimum(tl.where(inside, W, column), tl.where(stop, column + 1, W))
    count = tl.min(ends, axis=1)
    emitted = column < count[:, None]
    last = tl.sum(tl.where(column == count[:, None] - 1, target, 0), axis=1)
    stopped = tl.max(tl.where(stop & emitted, 1, 0), axis=1) > 0
    ended = tl.where(live & (count >= budget), _LENGTH, _RUNNING)
    tl.store(accept_ptr + request * accept_stride, accepted.to(tl.int32), mask=known)
    tl.store(commit_ptr + request * commit_stride, count.to(tl.int32), mask=known)
    tl.store(bonus_ptr + request * bonus_stride, tl.where(count > 0, last, -1), mask=known)
    out = out_ptr + request[:, None] * out_stride + column * out_column_stride
    tl.store(out, tl.where(emitted, target, -1), mask=known[:, None] & (column < rows))
    tl.store(finished_ptr + request * finished_stride, tl.where(stopped, _STOPPED, ended).to(tl.int32), mask=known)


@triton.jit(do_not_specialize=["batch", "rows", "num_stop"])
def accept_prefix_kernel(
    candidates_ptr, candidates_stride, target_ptr, target_stride,  # [B, R] x2
    stop_ptr, stop_stride, num_stop, budget_ptr, count_ptr,  # [B, E], [B], [B] or None
    accept_ptr, commit_ptr, bonus_ptr, out_ptr, finished_ptr,  # out
    accept_stride, commit_stride, bonus_stride, out_stride, out_column_stride, finished_stride,
    batch, rows,
    P: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Target-only verification of P requests; W is a power of two above the R rows."""
    request = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    column = tl.arange(0, W)[None, :]
    known = request < batch
    limit = tl.full([P], 0, tl.int64) + rows - 1
    if count_ptr is not None:
        limit = tl.minimum(limit, tl.load(count_ptr + request, mask=known, other=-1).to(tl.int64))
    row = request[:, None]
    drawn = tl.load(
        candidates_ptr + row * candidates_stride + column + 1, mask=known[:, None] & (column < rows - 1), other=-1
    ).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride + column, mask=known[:, None] & (column < rows), other=-1).to(
        tl.int64
    )
    match = (drawn == target) & (drawn >= 0) & (column < limit[:, None])
    accepted = tl.min(tl.where(match, W, column), axis=1).to(tl.int64)
    emit(
        target, accepted, limit >= 0, known, request, stop_ptr, stop_stride, num_stop, budget_ptr,
        accept_ptr, commit_ptr, bonus_ptr, out_ptr, finished_ptr,
        accept_stride, commit_stride, bonus_stride, out_stride, out_column_stride, finished_stride, rows, W,
    )  # fmt: skip
