"""Triton kernel of the commit; see kernels.md beside this file for its programs."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.commit_kv.kernels_place import flags_of, place
from dmtp_kernels.ops.commit_kv.kernels_slots import count_of


@triton.jit
def _cut(values, c: tl.constexpr, STARTS: tl.constexpr):
    """What belongs to cache c of a tuple over all layers, or of one with one value a cache."""
    if len(values) == len(STARTS) - 1:
        return values[c : c + 1]
    else:
        return values[STARTS[c] : STARTS[c + 1]]


@triton.jit(do_not_specialize=["batch", "width", "num_slots", "first_slot", "hidden_size", "table_rows", "tiles"])
def commit_kv_kernel(
    rows_k, rows_k_b, rows_k_r, rows_k_h,  # L x [B, R, HEADS, DK]; strides: a tuple of one a cache, or of L
    rows_v, rows_v_b, rows_v_r, rows_v_h,  # L x [B, R, HEADS, DV]
    k_caches, k_page, k_row, k_head,  # L x [pages, PAGE, HEADS, DK]
    v_caches, v_page, v_row, v_head,  # L x [pages, PAGE, HEADS, DV]
    valid_ptr, valid_s, live_ptr, live_s, dst, dst_b,  # [B] x 2, C x [B, R]
    pending_ptr, pending_s, promote_ptr, promote_s, scratch_ptr, scratch_b,  # [B], [B], [B, R] of the last cache
    hidden_ptr, hidden_b, hidden_r, next_ptr, next_b, lengths_ptr, lengths_s,  # [B, R, H], [B, H] out, [B] out
    error_ptr, error_s,  # [B] out
    k_scales, k_scale_b, k_scale_h, v_scales, v_scale_b, v_scale_h,  # of the caches that have some x [B, HEADS]
    k_norms,  # 1 or L x [DK], or None
    cos_sin_ptr, cos_sin_row, table_rows, positions_ptr, positions_b,  # [M, ROTARY], [B, R]
    batch, width, num_slots, first_slot, hidden_size, tiles,  # C slots, C first slots; tiles of a request's rows
    EPS: tl.constexpr, OFFSET: tl.constexpr, STARTS: tl.constexpr, SCALES_K: tl.constexpr, SCALES_V: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, FP8_K: tl.constexpr, FP8_V: tl.constexpr,
    ROWS: tl.constexpr, SCAN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one request's rows in one layer's K or V, or a part of its hidden; see kernels.md.

    Layers STARTS[c] .. STARTS[c + 1] - 1 belong to cache c, scales likewise; PAGE .. FP8_V have one value a cache.
    """
    CACHES: tl.constexpr = len(STARTS) - 1
    parts = PARTS + tiles * 0
    for c in tl.static_range(CACHES):
        parts += 2 * (STARTS[c + 1] - STARTS[c]) * tiles * ((HEADS[c] + GROUP[c] - 1) // GROUP[c])
    b = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    counts = (valid_ptr, valid_s, None, 0, None, 0, None, 0, None, 0, live_ptr, live_s)
    count = count_of(b, counts, width)
    for c in tl.static_range(CACHES):
        places = (
            valid_ptr, valid_s, dst[c], dst_b[c],
            pending_ptr if c == CACHES - 1 else None, pending_s, promote_ptr if c == CACHES - 1 else None, promote_s,
            scratch_ptr if c == CACHES - 1 else None, scratch_b, live_ptr, live_s,
        )  # fmt: skip
        sizes = (batch, width, num_slots[c], first_slot[c])
        groups = (HEADS[c] + GROUP[c] - 1) // GROUP[c]
        one = tiles * groups  # programs of one layer's K
        half = (STARTS[c + 1] - STARTS[c]) * one
        if (part >= 0) & (part < half) & (count > 0):
            place(
                _cut(rows_k, c, STARTS), _cut(rows_k_b, c, STARTS), _cut(rows_k_r, c, STARTS),
                _cut(rows_k_h, c, STARTS), _cut(k_caches, c, STARTS), _cut(k_page, c, STARTS),
                _cut(k_row, c, STARTS), _cut(k_head, c, STARTS), part // one, b, part % one // groups,
                part % groups, count, places, sizes,
                k_scales[SCALES_K[c] : SCALES_K[c + 1]] if SCALES_K[c] < SCALES_K[c + 1] else None,
                k_scale_b[SCALES_K[c] : SCALES_K[c + 1]], k_scale_h[SCALES_K[c] : SCALES_K[c + 1]], k_norms,
                cos_sin_ptr, cos_sin_row, table_rows, positions_ptr, positions_b,
                EPS, OFFSET, PAGE[c], HEADS[c], DK[c], ROWS, GROUP[c], DKP[c], SCAN, ROTARY, FP8_K[c],
            )  # fmt: skip
        if (part >= half) & (part < 2 * half) & (count > 0):
            rest = part - half
            place(
                _cut(rows_v, c, STARTS), _cut(rows_v_b, c, STARTS), _cut(rows_v_r, c, STARTS),
                _cut(rows_v_h, c, STARTS), _cut(v_caches, c, STARTS), _cut(v_page, c, STARTS),
                _cut(v_row, c, STARTS), _cut(v_head, c, STARTS), rest // one, b, rest % one // groups,
                rest % groups, count, places, sizes,
                v_scales[SCALES_V[c] : SCALES_V[c + 1]] if SCALES_V[c] < SCALES_V[c + 1] else None,
                v_scale_b[SCALES_V[c] : SCALES_V[c + 1]], v_scale_h[SCALES_V[c] : SCALES_V[c + 1]], None,
                None, 0, 0, None, 0,
                EPS, OFFSET, PAGE[c], HEADS[c], DV[c], ROWS, GROUP[c], DVP[c], SCAN, 0, FP8_V[c],
            )  # fmt: skip
        part -= 2 * half
    if part >= 0:
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        if hidden_ptr is not None:
            mask = (column < hidden_size) & (count > 0)
            value = tl.load(hidden_ptr + b * hidden_b + (count - 1) * hidden_r + column, mask=mask)
            tl.store(next_ptr + b * next_b + column, value, mask=mask)
    if part == 0:
        valid = tl.load(valid_ptr + b * valid_s).to(tl.int64)
        live = count == count
        if live_ptr is not None:
            live = tl.load(live_ptr + b * live_s) != 0
        flags = tl.where(live & ((valid < 0) | (valid > width)), 1, 0)
        for c in tl.static_range(CACHES):
            places = (
                valid_ptr, valid_s, dst[c], dst_b[c],
                pending_ptr if c == CACHES - 1 else None, pending_s,
                promote_ptr if c == CACHES - 1 else None, promote_s,
                scratch_ptr if c == CACHES - 1 else None, scratch_b, live_ptr, live_s,
            )  # fmt: skip
            sizes = (batch, width, num_slots[c], first_slot[c])
            flags |= flags_of(b, count, places, sizes, table_rows, positions_ptr, positions_b, ROWS, SCAN, ROTARY)
        tl.store(error_ptr + b * error_s, flags.to(tl.int32))
        if lengths_ptr is not None:
            at = lengths_ptr + b * lengths_s
            grown = tl.load(at, mask=count > 0) + count.to(lengths_ptr.dtype.element_ty)
            tl.store(at, grown, mask=count > 0)
