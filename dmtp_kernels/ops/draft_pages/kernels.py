"""Triton kernel of the temporary page tables."""

from __future__ import annotations

import triton
import triton.language as tl

_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["source_rows", "capacity", "window", "block_slots", "width", "tiles"])
def draft_page_table_kernel(
    source_ptr, source_stride, source_rows,  # [R, M] page ids, or token slots
    pool_ptr,  # [B] row of each request, None: its own number
    ctx_ptr, valid_ptr,  # [B] x2, valid_ptr may be None
    capacity, window, block_slots,  # in rows of the cache
    draft_ptr, draft_stride, draft_column_stride, width,  # [B, width] out
    len_ptr, len_stride, skip_ptr, skip_stride,  # [B] x2 out
    tiles,  # programs of one request
    PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of a request's columns; the program of the first tile also writes its lengths."""
    request = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = request if pool_ptr is None else tl.load(pool_ptr + request).to(tl.int64)
    ctx = tl.load(ctx_ptr + request).to(tl.int64)
    limit = tl.cast(capacity, tl.int64) - block_slots
    live = (ctx > 0) & (row >= 0) & (row < source_rows)
    fits, refused = live & (ctx <= limit), live & (ctx > limit)
    ctx = tl.where(fits, ctx, 0)
    start = tl.maximum(ctx - window, 0)
    if valid_ptr is not None:
        start = tl.maximum(start, tl.load(valid_ptr + request).to(tl.int64))
    start = tl.minimum(start, ctx)
    first = start // PAGE_SIZE
    length = ctx - first * PAGE_SIZE

    if tile == 0:
        skip = tl.where(refused, -1, start - first * PAGE_SIZE)
        # a length of -1 makes the row inert to attention: with 0 it would attend its block alone
        rows = tl.where(refused, -1, length)
        tl.store(len_ptr + request * len_stride, rows.to(tl.int32))
        tl.store(skip_ptr + request * skip_stride, skip.to(tl.int32))

    column = tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    used = fits & (column * PAGE_SIZE < length + block_slots)
    entry = (first + column) * PAGE_SIZE if SLOTS else first + column
    # the row of a dead request may lie outside the source: its mask is empty
    page = tl.load(source_ptr + row * source_stride + entry, mask=used & (column < width), other=0).to(tl.int64)
    if SLOTS:
        # division rounds towards zero: a negative slot may become page 0, which is what it must become
        page = page // PAGE_SIZE
    page = tl.where((page >= 0) & (page <= _INT32_MAX), page, 0)
    out = draft_ptr + request * draft_stride + column * draft_column_stride
    tl.store(out, page.to(tl.int32), mask=column < width)
