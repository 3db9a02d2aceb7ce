"""Triton kernels of block attention: split-KV flash decoding with a fixed order of sums.

Scores are in units of log2. A state of some keys is `(top, total, acc)`: the greatest score `[M]`, the sum of
`2 ** (score - top)` `[M]`, and the same sum weighted by V `[M, D]`; top is -inf while no key was visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)
_NEG_INF = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # top of keys that are visible and score -inf
_COUNTS = ["capacity", "pages", "heads", "rows", "slots", "window", "splits", "chunk"]


@triton.jit
def _request(
    b, ctx_ptr, valid_ptr, length_ptr, capacity, rows, slots, window, IN_CACHE: tl.constexpr, BY_QUERY: tl.constexpr
):
    """Of one request: context rows, valid block rows, the first visible context row and the row that chunks start at.

    An inert request has no rows. Without a window chunks start at row 0, else at the window's first row.
    """
    ctx = tl.load(ctx_ptr + b).to(tl.int64)
    length = tl.cast(rows, tl.int64)
    if length_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(length_ptr + b).to(tl.int64), 0), length)
    room = tl.cast(capacity, tl.int64)
    if IN_CACHE:
        room -= length
    live = (ctx >= 0) & (ctx <= room)
    ctx = tl.where(live, ctx, 0)
    length = tl.where(live, length, 0)
    base = ctx * 0
    if window is not None:
        base = ctx - window
        if BY_QUERY:
            base += rows - slots + 1
        base = tl.minimum(tl.maximum(base, 0), ctx)
    low = base
    if valid_ptr is not None:
        low = tl.minimum(tl.maximum(tl.load(valid_ptr + b).to(tl.int64), base), ctx)
    return ctx.to(tl.int32), length.to(tl.int32), low.to(tl.int32), base.to(tl.int32)


@triton.jit
def _tanh(x):
    tail = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    if x.dtype == tl.float64:
        return tail
    # the difference loses the low bits of a small x
    y = x * x
    near = x + x * y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, near, tail)


@triton.jit
def _add_tile(
    q, k, v, seen, top, total, acc, factor, SCALE: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr
):  # [M, D], [N, D] x2, [M or 1, N], [M] x2, [M, D]
    """The state after one tile of keys; rows that no query sees are zero in k and v. RAGGED: masks differ by query."""
    score = tl.dot(q, tl.trans(k), out_dtype=acc.dtype, input_precision="ieee")
    if factor is not None:
        score = score * factor
    score = score * SCALE if CAP is None else _tanh(score * SCALE) * CAP
    score = tl.where(seen, score, _NEG_INF)
    some = tl.max(seen.to(tl.int32), axis=1) > 0
    peak = tl.maximum(tl.max(score, axis=1), tl.where(some, _LOWEST, _NEG_INF))
    new = tl.maximum(top, peak)
    shift = tl.where(new == _NEG_INF, 0.0, new)
    weight = tl.exp2(score - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weight, axis=1)
    acc = acc * decay[:, None]
    if RAGGED:
        # 0 * NaN must not reach the queries that do not see the row
        finite = tl.abs(v.to(acc.dtype)) < float("inf")
        acc = tl.dot(weight.to(v.dtype), tl.where(finite, v, 0.0), acc, out_dtype=acc.dtype, input_precision="ieee")
        bad = tl.where(finite, 0.0, 1.0)
        if tl.max(tl.max(bad, axis=1), axis=0) > 0:
            hits = tl.dot(seen.to(v.dtype), bad.to(v.dtype), out_dtype=acc.dtype, input_precision="ieee")
            acc = tl.where(hits > 0, float("nan"), acc)
    else:
        acc = tl.dot(weight.to(v.dtype), v, acc, out_dtype=acc.dtype, input_precision="ieee")
    return new, total, acc


@triton.jit
def _merged(top_a, total_a, acc_a, top_b, total_b, acc_b):
    """The state of both sets of keys; one of no key changes no bit of the other."""
    top = tl.maximum(top_a, top_b)
    shift = tl.where(top == _NEG_INF, 0.0, top)
    a = tl.exp2(top_a - shift)
    b = tl.exp2(top_b - shift)
    return top, total_a * a + total_b * b, acc_a * a[:, None] + acc_b * b[:, None]


@triton.jit
def _finish(
    top, total, acc, live, row, d, b, head,
    sink_ptr, out_ptr, out_b, out_s, out_h, out_d, lse_ptr, lse_b, lse_s, lse_h,
    D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the rows of a final state; without a key 0 and -inf."""
    heads = head * GROUP + row % GROUP
    empty = top == _NEG_INF
    if sink_ptr is not None:
        extra = tl.load(sink_ptr + heads, mask=live, other=0.0).to(acc.dtype) * (1.0 / _LN2)
        joint = tl.maximum(top, extra)
        shift = tl.where(joint == _NEG_INF, 0.0, joint)
        decay = tl.exp2(top - shift)
        total = total * decay + tl.exp2(extra - shift)
        acc = acc * decay[:, None]
        top = joint
    # + 0.0: merging with nothing turns -0.0 into 0.0, and whether that was done must not show
    value = tl.where(empty[:, None], 0.0, (acc + 0.0) / total[:, None])
    log = tl.where(empty, _NEG_INF, (top + tl.log2(total)) * _LN2)
    slot = (row // GROUP).to(tl.int64)
    at = tl.cast(b, tl.int64) * out_b + slot * out_s + heads.to(tl.int64) * out_h
    mask = live[:, None] & (d < D)[None, :]
    tl.store(out_ptr + at[:, None] + d.to(tl.int64)[None, :] * out_d, value.to(out_ptr.dtype.element_ty), mask=mask)
    at = tl.cast(b, tl.int64) * lse_b + slot * lse_s + heads.to(tl.int64) * lse_h
    tl.store(lse_ptr + at, log, mask=live)


@triton.jit
def _context_tile(
    start, low, end, table, k, k_page, k_row, v, v_page, v_row, pages, d,
    N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """K and V `[N, D]` of table rows from `start`, zero where not visible, and which `[N]` are: mapped, in [low, end)."""
    lane = tl.arange(0, N)
    position = start + lane
    seen = (position >= low) & (position < end)
    if ONE_PAGE:
        page = tl.load(table + start // P).to(tl.int64)
        seen = seen & (page >= 0) & (page < pages)
        offset = start % P + lane
    else:
        column = position // P
        page = tl.load(table + column, mask=seen, other=-1).to(tl.int64)
        seen = seen & (page >= 0) & (page < pages)
        offset = position - column * P
    mask = seen[:, None] & (d < D)[None, :]
    k_at = k + (page * k_page + offset.to(tl.int64) * k_row)[:, None] + d[None, :]
    v_at = v + (page * v_page + offset.to(tl.int64) * v_row)[:, None] + d[None, :]
    return tl.load(k_at, mask=mask, other=0.0), tl.load(v_at, mask=mask, other=0.0), seen


@triton.jit
def _block_state(
    q, top, total, acc, slot, d, ctx, length, table, k, k_page, k_row, v, v_page, v_row, pages, k_factor, v_factor,
    dense_k, dense_k_row, dense_v, dense_v_row, rows, slots, window,
    D: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The state of the block's rows."""
    lane = tl.arange(0, NB)
    own = slot + (rows - slots)  # [M] block row of each query
    for start in range(0, length, NB):
        row = start + lane
        if dense_k is None:
            tile_k, tile_v, seen = _context_tile(
                ctx + start, ctx, ctx + length, table, k, k_page, k_row, v, v_page, v_row, pages, d, NB, D, P, False
            )
        else:
            seen = row < length
            mask = seen[:, None] & (d < D)[None, :]
            at = row.to(tl.int64)[:, None]
            tile_k = tl.load(dense_k + at * dense_k_row + d[None, :], mask=mask, other=0.0)
            tile_v = tl.load(dense_v + at * dense_v_row + d[None, :], mask=mask, other=0.0)
        seen = seen[None, :]
        if CAUSAL:
            seen = seen & (row[None, :] <= own[:, None])
        if BY_QUERY:
            seen = seen & (tl.abs(row[None, :] - own[:, None]) < window)
        top, total, acc = _add_tile(
            q, tile_k.to(q.dtype), tile_v.to(q.dtype), seen, top, total, acc, k_factor, SCALE, CAP, CAUSAL or BY_QUERY
        )
    if v_factor is not None:
        acc = acc * v_factor
    return top, total, acc


@triton.jit(do_not_specialize=_COUNTS)
def block_attention_kernel(
    q_ptr, q_b, q_s, q_h,  # [B, S, Hq, D]
    k_ptr, k_page, k_row, k_h,  # [pages, P, Hkv, D]
    v_ptr, v_page, v_row, v_h,
    table_ptr, table_b, pages, capacity,  # [B, MP]
    ctx_ptr, valid_ptr, length_ptr,  # [B] x3, the last two may be None
    block_k_ptr, block_k_b, block_k_row, block_k_h,  # [B, Sb, Hkv, D], None: in the cache
    block_v_ptr, block_v_b, block_v_row, block_v_h,
    k_scale_ptr, k_scale_b, k_scale_h, v_scale_ptr, v_scale_b, v_scale_h,  # [B, Hkv], None: 1
    sink_ptr,  # [Hq]
    out_ptr, out_b, out_s, out_h, out_d,  # [B, S, Hq, D] out
    lse_ptr, lse_b, lse_s, lse_h,  # [B, S, Hq] out
    acc_ptr, total_ptr, top_ptr,  # [B, Hkv, splits, S * GROUP, D], [B, Hkv, splits, S * GROUP] x2 out, None: one split
    heads, rows, slots, window, splits, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, FINE: tl.constexpr, STAGES: tl.constexpr,
    ONE_PAGE: tl.constexpr, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of the context of one request and kv head, for M of its S * GROUP query rows; chunk 0 adds the block.

    A chunk is summed in parts of FINE rows, each from nothing, that are merged in order: the bits do not show how many
    of them a chunk has.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    tiles = tl.cdiv(slots * GROUP, M)
    pid = tl.program_id(0)
    tile, pid = pid % tiles, pid // tiles
    head, pid = pid % heads, pid // heads
    split, b = pid % splits, (pid // splits).to(tl.int64)
    ctx, length, low, base = _request(
        b, ctx_ptr, valid_ptr, length_ptr, capacity, rows, slots, window, block_k_ptr is None, BY_QUERY
    )
    begin = tl.maximum(base + split * chunk, base + (low - base) // N * N)
    end = tl.minimum(base + (split + 1) * chunk, ctx)
    if (split > 0) & (begin >= end):
        return
    head64 = tl.cast(head, tl.int64)
    row = tile * M + tl.arange(0, M)
    live = row < slots * GROUP
    slot = row // GROUP
    d = tl.arange(0, DP)
    at = b * q_b + slot.to(tl.int64) * q_s + (head64 * GROUP + row % GROUP) * q_h
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    table = table_ptr + b * table_b
    k = k_ptr + head64 * k_h
    v = v_ptr + head64 * v_h
    k_factor = None
    v_factor = None
    if k_scale_ptr is not None:
        k_factor = tl.load(k_scale_ptr + b * k_scale_b + head64 * k_scale_h).to(kind)
    if v_scale_ptr is not None:
        v_factor = tl.load(v_scale_ptr + b * v_scale_b + head64 * v_scale_h).to(kind)
    none = tl.full((M,), _NEG_INF, kind)
    zero = tl.zeros((M,), kind)
    zeros = tl.zeros((M, DP), kind)
    sum_top, sum_total, sum_acc = none, zero, zeros
    if split == 0:
        if block_k_ptr is None:
            sum_top, sum_total, sum_acc = _block_state(
                q, none, zero, zeros, slot, d, ctx, length, table, k, k_page, k_row, v, v_page, v_row, pages,
                k_factor, v_factor, None, 0, None, 0, rows, slots, window, D, P, NB, CAUSAL, BY_QUERY, SCALE, CAP,
            )  # fmt: skip
        else:
            sum_top, sum_total, sum_acc = _block_state(
                q, none, zero, zeros, slot, d, ctx, length, table, k, k_page, k_row, v, v_page, v_row, pages,
                None, None, block_k_ptr + b * block_k_b + head64 * block_k_h, block_k_row,
                block_v_ptr + b * block_v_b + head64 * block_v_h, block_v_row,
                rows, slots, window, D, P, NB, CAUSAL, BY_QUERY, SCALE, CAP,
            )  # fmt: skip
    top, total, acc = none, zero, zeros
    if BY_QUERY:
        # rows from `edge` on are seen by every query
        edge = tl.minimum(ctx + rows - window, end)
        first = ctx + rows - slots - window + 1
        for start in range(begin, edge, N):
            tile_k, tile_v, seen = _context_tile(
                start, low, end, table, k, k_page, k_row, v, v_page, v_row, pages, d, N, D, P, ONE_PAGE
            )
            seen = seen[None, :] & ((start + tl.arange(0, N))[None, :] >= (first + slot)[:, None])
            top, total, acc = _add_tile(
                q, tile_k.to(q.dtype), tile_v.to(q.dtype), seen, top, total, acc, k_factor, SCALE, CAP, True
            )
            if ((start + N - base) % FINE == 0) | (start + N >= end):
                if v_factor is not None:
                    acc = acc * v_factor
                sum_top, sum_total, sum_acc = _merged(sum_top, sum_total, sum_acc, top, total, acc)
                top, total, acc = none, zero, zeros
            begin = start + N
    for start in tl.range(begin, end, N, num_stages=STAGES):
        tile_k, tile_v, seen = _context_tile(
            start, low, end, table, k, k_page, k_row, v, v_page, v_row, pages, d, N, D, P, ONE_PAGE
        )
        top, total, acc = _add_tile(
            q, tile_k.to(q.dtype), tile_v.to(q.dtype), seen[None, :], top, total, acc, k_factor, SCALE, CAP, False
        )
        if ((start + N - base) % FINE == 0) | (start + N >= end):
            if v_factor is not None:
                acc = acc * v_factor
            sum_top, sum_total, sum_acc = _merged(sum_top, sum_total, sum_acc, top, total, acc)
            top, total, acc = none, zero, zeros
    if acc_ptr is None:
        _finish(
            sum_top, sum_total, sum_acc, live, row, d, b, head, sink_ptr, out_ptr, out_b, out_s, out_h, out_d,
            lse_ptr, lse_b, lse_s, lse_h, D, GROUP,
        )  # fmt: skip
    else:
        at = ((b * heads + head) * splits + split) * (slots * GROUP) + row
        mask = live[:, None] & (d < D)[None, :]
        tl.store(acc_ptr + at[:, None] * D + d[None, :], sum_acc, mask=mask)
        tl.store(total_ptr + at, sum_total, mask=live)
        tl.store(top_ptr + at, sum_top, mask=live)


@triton.jit(do_not_specialize=_COUNTS)
def block_attention_combine_kernel(
    acc_ptr, total_ptr, top_ptr,  # [B, Hkv, splits, S * GROUP, D], [B, Hkv, splits, S * GROUP] x2
    capacity, ctx_ptr, valid_ptr, length_ptr,
    sink_ptr,
    out_ptr, out_b, out_s, out_h, out_d,
    lse_ptr, lse_b, lse_s, lse_h,
    heads, rows, slots, window, splits, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, PER: tl.constexpr,
    IN_CACHE: tl.constexpr, BY_QUERY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The splits of one request and kv head, for R query rows, merged in order: PER of them from nothing, then these."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    tiles = tl.cdiv(slots * GROUP, R)
    pid = tl.program_id(0)
    tile, pid = pid % tiles, pid // tiles
    head, b = pid % heads, (pid // heads).to(tl.int64)
    ctx, _, low, base = _request(b, ctx_ptr, valid_ptr, length_ptr, capacity, rows, slots, window, IN_CACHE, BY_QUERY)
    first = (low - base) // chunk
    last = tl.cdiv(ctx - base, chunk)
    last = tl.where(low < ctx, last, 0)
    row = tile * R + tl.arange(0, R)
    live = row < slots * GROUP
    d = tl.arange(0, DP)
    mask = live[:, None] & (d < D)[None, :]
    none = tl.full((R,), _NEG_INF, kind)
    zero = tl.zeros((R,), kind)
    zeros = tl.zeros((R, DP), kind)
    sum_top, sum_total, sum_acc = none, zero, zeros
    for start in range(0, tl.maximum(last, 1), PER):
        top, total, acc = none, zero, zeros
        for i in tl.static_range(PER):
            split = start + i
            # split 0 holds the block, wherever the context begins
            used = live & (((split >= first) & (split < last)) | (split == 0))
            at = ((b * heads + head) * splits + split) * (slots * GROUP) + row
            next_top = tl.load(top_ptr + at, mask=used, other=_NEG_INF)
            next_total = tl.load(total_ptr + at, mask=used, other=0.0)
            next_acc = tl.load(acc_ptr + at[:, None] * D + d[None, :], mask=mask & used[:, None], other=0.0)
            top, total, acc = _merged(top, total, acc, next_top, next_total, next_acc)
        sum_top, sum_total, sum_acc = _merged(sum_top, sum_total, sum_acc, top, total, acc)
    _finish(
        sum_top, sum_total, sum_acc, live, row, d, b, head, sink_ptr, out_ptr, out_b, out_s, out_h, out_d,
        lse_ptr, lse_b, lse_s, lse_h, D, GROUP,
    )  # fmt: skip
