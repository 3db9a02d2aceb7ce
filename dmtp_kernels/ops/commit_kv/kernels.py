"""Triton kernel of the commit; see kernels.md beside this file for its programs."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.commit_kv.kernels_rows import made, rotary_partner
from dmtp_kernels.ops.commit_kv.kernels_slots import count_of, promotion_of, scan, slots_of


@triton.jit
def _of(values, layer):
    """Element `layer` of a tuple, of which one may do for all layers."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        if layer == i:
            chosen = values[i]
    return chosen


@triton.jit
def _stride_of(values, layer):
    chosen = tl.cast(values[0], tl.int64)
    for i in tl.static_range(1, len(values)):
        if layer == i:
            chosen = tl.cast(values[i], tl.int64)
    return chosen


@triton.jit
def _place(
    rows, rows_b, rows_r, rows_h, caches, page_s, row_s, head_s, layer, b, tile, group, count, places, sizes,
    scales, scale_b, scale_h, norms, cos_sin_ptr, cos_sin_row, table_rows, positions_ptr, positions_b,
    EPS: tl.constexpr, OFFSET: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, DP: tl.constexpr, SCAN: tl.constexpr, ROTARY: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """A tile of a request's rows, some of their heads, in one layer's K or V; and its promoted row."""
    rows_ptr = _of(rows, layer)
    cache_ptr = _of(caches, layer)
    page_s, row_s, head_s = _stride_of(page_s, layer), _stride_of(row_s, layer), _stride_of(head_s, layer)
    batch, width, num_slots, first_slot = sizes
    j = tile * ROWS + tl.arange(0, ROWS)
    slot = slots_of(b + j * 0, j, j < width, places, width)
    own = tl.where((slot >= first_slot) & (slot < num_slots), slot, -2).to(tl.int32)  # [ROWS]
    h = group * GROUP + tl.arange(0, GROUP)
    d = tl.arange(0, DP)
    lanes = (h < HEADS)[None, :, None] & (d < D)[None, None, :]
    mask = (own >= 0)[:, None, None] & lanes
    at = (
        rows_ptr
        + b * _stride_of(rows_b, layer)
        + (j.to(tl.int64) * _stride_of(rows_r, layer))[:, None, None]
        + (h.to(tl.int64) * _stride_of(rows_h, layer))[None, :, None]
    )
    x = tl.load(at + d[None, None, :], mask=mask, other=0.0)
    y = x
    if ROTARY > 0:
        y = tl.load(at + rotary_partner(d, ROTARY)[None, None, :], mask=mask, other=0.0)

    PENDING: tl.constexpr = places[4] is not None
    heads_at = (h.to(tl.int64) * head_s)[None, :, None] + d[None, None, :]
    source, target = promotion_of(b, count, places, num_slots, first_slot)
    old = x
    if PENDING:
        from_ptr = cache_ptr + (source // PAGE).to(tl.int64) * page_s + (source % PAGE).to(tl.int64) * row_s
        old = tl.load(from_ptr + heads_at, mask=lanes & (source >= 0), other=0)
    if ROTARY > 0 or norms is not None or scales is not None or x.dtype != cache_ptr.dtype.element_ty:
        scale = None
        if scales is not None:
            scale_at = _of(scales, layer) + b * _stride_of(scale_b, layer)
            scale = tl.load(scale_at + h.to(tl.int64) * _stride_of(scale_h, layer), mask=h < HEADS, other=1.0)
        position = j.to(tl.int64)
        if ROTARY > 0:
            position = tl.load(positions_ptr + b * positions_b + j, mask=own >= 0, other=0).to(tl.int64)
            position = tl.minimum(tl.maximum(position, 0), table_rows - 1)
        norm_ptr = None
        if norms is not None:
            norm_ptr = _of(norms, layer)
        x = made(
            x, y, d, norm_ptr, position, cos_sin_ptr, cos_sin_row, scale, cache_ptr.dtype.element_ty,
            EPS, OFFSET, D, ROTARY, FP8,
        )  # fmt: skip

    lost, overruled, taken, winner = scan(
        b, own, b.to(tl.int32) * width + j, source, target, batch, width, places, num_slots, first_slot, SCAN
    )
    # what a program reads may be what its threads write
    tl.debug_barrier()
    keep = (own >= 0) & (lost == 0)
    to = cache_ptr + ((own // PAGE).to(tl.int64) * page_s + (own % PAGE).to(tl.int64) * row_s)[:, None, None]
    tl.store(to + heads_at, x, mask=keep[:, None, None] & lanes)
    if PENDING:
        # by the program that overwrites the slot it is read from
        moves = (target >= 0) & (overruled == 0) & (taken == 0) & (winner // ROWS == tile)
        to = cache_ptr + (target // PAGE).to(tl.int64) * page_s + (target % PAGE).to(tl.int64) * row_s
        tl.store(to + heads_at, old, mask=lanes & moves)


@triton.jit
def _account(
    b, count, places, sizes, lengths_ptr, lengths_s, error_ptr, error_s, table_rows, positions_ptr, positions_b,
    ROWS: tl.constexpr, SCAN: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Length and error bits of a request."""
    batch, width, num_slots, first_slot = sizes
    valid_ptr, valid_s = places[0], places[1]
    valid = tl.load(valid_ptr + b * valid_s).to(tl.int64)
    live = count == count
    if places[10] is not None:
        live = tl.load(places[10] + b * places[11]) != 0
    flags = tl.where(live & ((valid < 0) | (valid > width)), 1, 0)
    if count > 0:
        if lengths_ptr is not None:
            at = lengths_ptr + b * lengths_s
            tl.store(at, tl.load(at) + count.to(lengths_ptr.dtype.element_ty))
        for start in range(0, width, ROWS):
            j = start + tl.arange(0, ROWS)
            slot = slots_of(b + j * 0, j, j < width, places, width)
            flags |= tl.max(tl.where(slot >= num_slots, 2, 0), axis=0)
            if ROTARY > 0:
                placed = (slot >= first_slot) & (slot < num_slots)
                position = tl.load(positions_ptr + b * positions_b + j, mask=placed, other=0).to(tl.int64)
                flags |= tl.max(tl.where((position < 0) | (position >= table_rows), 8, 0), axis=0)
        if places[4] is not None:
            pending = tl.load(places[4] + b * places[5]).to(tl.int64)
            promote = tl.load(places[6] + b * places[7]).to(tl.int64)
            inside = (pending >= first_slot) & (pending < num_slots)
            flags |= tl.where(inside & (promote >= num_slots), 2, 0)
            source, target = promotion_of(b, count, places, num_slots, first_slot)
            none = tl.full([1], -2, tl.int32)
            _, _, taken, _ = scan(b, none, none, source, target, batch, width, places, num_slots, first_slot, SCAN)
            flags |= tl.where((taken != 0) & (source != target), 4, 0)
    tl.store(error_ptr + b * error_s, flags.to(tl.int32))


@triton.jit(do_not_specialize=["batch", "width", "num_slots", "first_slot", "hidden_size", "table_rows", "tiles"])
def commit_kv_kernel(
    rows_k, rows_k_b, rows_k_r, rows_k_h,  # L x [B, R, HEADS, DK]; strides: a tuple of one for all layers, or of L
    rows_v, rows_v_b, rows_v_r, rows_v_h,  # L x [B, R, HEADS, DV]
    k_caches, k_page, k_row, k_head,  # L x [pages, PAGE, HEADS, DK]
    v_caches, v_page, v_row, v_head,  # L x [pages, PAGE, HEADS, DV]
    valid_ptr, valid_s, dst_ptr, dst_b, pending_ptr, pending_s, promote_ptr, promote_s, scratch_ptr, scratch_b,
    live_ptr, live_s,  # [B], [B, R], [B], [B], [B, R], [B]
    hidden_ptr, hidden_b, hidden_r, next_ptr, next_b, lengths_ptr, lengths_s,  # [B, R, H], [B, H] out, [B] out
    error_ptr, error_s,  # [B] out
    k_scales, k_scale_b, k_scale_h, v_scales, v_scale_b, v_scale_h,  # 1 or L x [B, HEADS], or None
    k_norms,  # 1 or L x [DK], or None
    cos_sin_ptr, cos_sin_row, table_rows, positions_ptr, positions_b,  # [M, ROTARY], [B, R]
    batch, width, num_slots, first_slot, hidden_size, tiles,  # tiles of a request's rows
    EPS: tl.constexpr, OFFSET: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    SCAN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROTARY: tl.constexpr,
    FP8_K: tl.constexpr, FP8_V: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one request's rows in one layer's K or V, or a part of its hidden; see kernels.md."""
    LAYERS: tl.constexpr = len(rows_k)
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    one = tiles * GROUPS  # programs of one layer's K
    parts = 2 * LAYERS * one + PARTS
    b = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    places = (
        valid_ptr, valid_s, dst_ptr, dst_b, pending_ptr, pending_s, promote_ptr, promote_s, scratch_ptr, scratch_b,
        live_ptr, live_s,
    )  # fmt: skip
    sizes = (batch, width, num_slots, first_slot)
    count = count_of(b, places, width)
    if part < LAYERS * one:
        if count > 0:
            _place(
                rows_k, rows_k_b, rows_k_r, rows_k_h, k_caches, k_page, k_row, k_head, part // one, b,
                part % one // GROUPS, part % GROUPS, count, places, sizes, k_scales, k_scale_b, k_scale_h, k_norms,
                cos_sin_ptr, cos_sin_row, table_rows, positions_ptr, positions_b,
                EPS, OFFSET, PAGE, HEADS, DK, ROWS, GROUP, DKP, SCAN, ROTARY, FP8_K,
            )  # fmt: skip
    elif part < 2 * LAYERS * one:
        if count > 0:
            part -= LAYERS * one
            _place(
                rows_v, rows_v_b, rows_v_r, rows_v_h, v_caches, v_page, v_row, v_head, part // one, b,
                part % one // GROUPS, part % GROUPS, count, places, sizes, v_scales, v_scale_b, v_scale_h, None,
                None, 0, 0, None, 0,
                EPS, OFFSET, PAGE, HEADS, DV, ROWS, GROUP, DVP, SCAN, 0, FP8_V,
            )  # fmt: skip
    else:
        part -= 2 * LAYERS * one
        if hidden_ptr is not None:
            column = part * COLUMNS + tl.arange(0, COLUMNS)
            mask = (column < hidden_size) & (count > 0)
            value = tl.load(hidden_ptr + b * hidden_b + (count - 1) * hidden_r + column, mask=mask)
            tl.store(next_ptr + b * next_b + column, value, mask=mask)
        if part == 0:
            _account(
                b, count, places, sizes, lengths_ptr, lengths_s, error_ptr, error_s, table_rows, positions_ptr,
                positions_b, ROWS, SCAN, ROTARY,
            )  # fmt: skip
