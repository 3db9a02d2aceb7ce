"""What one program of a commit does with its rows: device functions of kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.commit_kv.kernels_rows import made, rotary_partner
from dmtp_kernels.ops.commit_kv.kernels_slots import promotion_of, scan, slots_of


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
def place(
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
def flags_of(
    b, count, places, sizes, table_rows, positions_ptr, positions_b,
    ROWS: tl.constexpr, SCAN: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Error bits of a request in one cache, without those of its count."""
    batch, width, num_slots, first_slot = sizes
    flags = tl.cast(0, tl.int32)
    if count > 0:
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
    return flags
