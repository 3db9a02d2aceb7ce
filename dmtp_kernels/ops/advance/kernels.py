"""Triton kernel of the round's bookkeeping."""

from __future__ import annotations

import triton
import triton.language as tl

_BAD_COUNT, _BAD_GRANT, _NO_PAGE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _any(condition):
    return tl.max(condition.to(tl.int32), axis=0) > 0


@triton.jit
def _enter_grants(
    table_ptr, stride, width, request, number: tl.constexpr,
    table, column, page, order,  # [G] this request's grants, and 0..G-1
    first_page,
):  # fmt: skip
    """Write the pages granted to one table; which of the grants were in order, and which of those counted, both [G]."""
    mine = (table == number) & (column >= 0) & (column < width) & (page >= first_page)
    same = (column[:, None] == column[None, :]) & mine[None, :] & (order[None, :] > order[:, None])
    counted = mine & (tl.max(same.to(tl.int32), axis=1) == 0)
    entry = table_ptr + request * stride + column
    tl.store(entry, page.to(table_ptr.dtype.element_ty), mask=counted)
    return mine, counted


@triton.jit
def _write_slots(
    table_ptr, stride, width, request,
    lane, position, live, left,  # lane 0 is the position before the round's first
    counted, column, page, GRANTS: tl.constexpr,
    first_page, slots_ptr, slots_step, previous_ptr, rows, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Slots of `position` in one table; whether a row that may be committed has none."""
    at = tl.where(position < 0, -1, position // PAGE_SIZE)
    inside = live & (lane <= rows) & (at >= 0) & (at < width)
    entry = tl.load(table_ptr + request * stride + at, mask=inside, other=-1).to(tl.int64)
    if GRANTS > 0:
        # the grants' stores need not have arrived
        mine = counted[None, :] & (column[None, :] == at[:, None])
        given = tl.max(tl.where(mine, page[None, :], -1), axis=1)
        entry = tl.where(given >= 0, given, entry)
    slot = tl.where(inside & (entry >= first_page), entry * PAGE_SIZE + position - at * PAGE_SIZE, -1)
    tl.store(slots_ptr + (lane - 1) * slots_step, slot, mask=(lane >= 1) & (lane <= rows))
    tl.store(previous_ptr + lane, slot, mask=lane == 0)
    return _any((slot < 0) & (lane >= 1) & (lane <= rows) & (lane <= left))


@triton.jit(
    do_not_specialize=["width0", "width1", "width2", "num_grants", "rows", "block_slots", "mask_id", "first_page"]
)
def advance_round_kernel(
    length_ptr, length_stride, anchor_ptr, anchor_stride, budget_ptr, budget_stride, finished_ptr, finished_stride,
    commit_ptr, commit_stride, bonus_ptr, bonus_stride, ended_ptr, ended_stride,  # [B] each
    table0_ptr, stride0, width0, table1_ptr, stride1, width1, table2_ptr, stride2, width2,  # [B, MP], may be None
    grants_ptr, grants_stride, grant_stride, num_grants,  # [B, G, 3], may be None
    rows, block_slots, mask_id, first_page,
    positions_ptr, positions_stride, positions_step, tokens_ptr, tokens_stride, tokens_step,  # [B, R] out
    context_ptr, context_stride, history_ptr, history_stride,  # [B] out
    slots_ptr, slots_stride, slots_table, slots_step, previous_ptr, previous_stride, previous_step,  # [B, T, R], [B, T]
    blocks_ptr, blocks_stride, blocks_step, error_ptr, error_stride,  # [B, S], [B] out
    PAGE0: tl.constexpr, PAGE1: tl.constexpr, PAGE2: tl.constexpr,
    TABLES: tl.constexpr, GRANTS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One request: its state, its grants, its next indices."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + request * length_stride).to(tl.int64)
    anchor = tl.load(anchor_ptr + request * anchor_stride).to(tl.int64)
    left = tl.load(budget_ptr + request * budget_stride).to(tl.int64)
    finished = tl.load(finished_ptr + request * finished_stride).to(tl.int64)
    given = tl.load(commit_ptr + request * commit_stride).to(tl.int64)
    bonus = tl.load(bonus_ptr + request * bonus_stride).to(tl.int64)
    ended = tl.load(ended_ptr + request * ended_stride).to(tl.int64)

    alive = left > 0
    miscounted = alive & ((given < 0) | (given > rows))
    count = tl.where(alive, tl.minimum(tl.maximum(given, 0), rows), 0)
    moved = count > 0
    length += count
    anchor = tl.where(moved, bonus, anchor)
    remaining = tl.where(ended == 0, tl.maximum(left - count, 0), 0)
    left = tl.where(moved, remaining, left)
    tl.store(length_ptr + request * length_stride, length.to(length_ptr.dtype.element_ty))
    tl.store(anchor_ptr + request * anchor_stride, anchor.to(anchor_ptr.dtype.element_ty))
    tl.store(budget_ptr + request * budget_stride, left.to(budget_ptr.dtype.element_ty))
    finished = tl.where(moved, ended, finished)
    tl.store(finished_ptr + request * finished_stride, finished.to(finished_ptr.dtype.element_ty))

    live = left > 0
    first = tl.where(live, length, 0)
    lane = tl.arange(0, LANES)
    position = first - 1 + lane
    used = (lane >= 1) & (lane <= rows)
    tl.store(positions_ptr + request * positions_stride + (lane - 1) * positions_step, position, mask=used)
    tl.store(tokens_ptr + request * tokens_stride + (lane - 1) * tokens_step, position + 1, mask=used)
    tl.store(context_ptr + request * context_stride, first)
    tl.store(history_ptr + request * history_stride, tl.maximum(first - 1, 0))
    if SLOTS > 0:
        slot = tl.arange(0, SLOTS)
        block = tl.where((slot == 0) & live, anchor, tl.cast(mask_id, tl.int64))
        tl.store(blocks_ptr + request * blocks_stride + slot * blocks_step, block, mask=slot < block_slots)

    skipped = alive & False
    if GRANTS > 0:
        order = tl.arange(0, GRANTS)
        grant = grants_ptr + request * grants_stride + order * grant_stride
        table = tl.load(grant, mask=order < num_grants, other=-1).to(tl.int64)
        column = tl.load(grant + 1, mask=table >= 0, other=-1).to(tl.int64)
        page = tl.load(grant + 2, mask=table >= 0, other=-1).to(tl.int64)
        skip = table >= 0
        if TABLES > 0:
            mine, counted0 = _enter_grants(
                table0_ptr, stride0, width0, request, 0, table, column, page, order, first_page
            )
            skip = skip & ~mine
        if TABLES > 1:
            mine, counted1 = _enter_grants(
                table1_ptr, stride1, width1, request, 1, table, column, page, order, first_page
            )
            skip = skip & ~mine
        if TABLES > 2:
            mine, counted2 = _enter_grants(
                table2_ptr, stride2, width2, request, 2, table, column, page, order, first_page
            )
            skip = skip & ~mine
        tl.store(grant, tl.full([GRANTS], -1, tl.int32), mask=table >= 0)
        skipped = _any(skip)
    else:
        column = lane
        page = position
        counted0 = lane < 0
        counted1 = lane < 0
        counted2 = lane < 0

    homeless = alive & False
    slots = slots_ptr + request * slots_stride
    previous = previous_ptr + request * previous_stride
    if TABLES > 0:
        homeless |= _write_slots(
            table0_ptr,
            stride0,
            width0,
            request,
            lane,
            position,
            live,
            left,
            counted0,
            column,
            page,
            GRANTS,
            first_page,
            slots + 0 * slots_table,
            slots_step,
            previous + 0 * previous_step,
            rows,
            PAGE0,
        )
    if TABLES > 1:
        homeless |= _write_slots(
            table1_ptr,
            stride1,
            width1,
            request,
            lane,
            position,
            live,
            left,
            counted1,
            column,
            page,
            GRANTS,
            first_page,
            slots + 1 * slots_table,
            slots_step,
            previous + 1 * previous_step,
            rows,
            PAGE1,
        )
    if TABLES > 2:
        homeless |= _write_slots(
            table2_ptr,
            stride2,
            width2,
            request,
            lane,
            position,
            live,
            left,
            counted2,
            column,
            page,
            GRANTS,
            first_page,
            slots + 2 * slots_table,
            slots_step,
            previous + 2 * previous_step,
            rows,
            PAGE2,
        )
    error = tl.where(live & miscounted, _BAD_COUNT, 0) + tl.where(skipped, _BAD_GRANT, 0)
    error += tl.where(live & homeless, _NO_PAGE, 0)
    tl.store(error_ptr + request * error_stride, error)
