"""Triton kernels of block attention: split-KV flash decoding with a fixed order of sums."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.block_attention.kernels_state import NEG_INF, add_tile, finish, merged, request

_COUNTS = ["capacity", "pages", "heads", "rows", "slots", "window", "splits", "chunk"]


@triton.jit
def _decoded(x, FP8: tl.constexpr, KIND: tl.constexpr):
    """Elements of a cache in the dtype of q: those of an fp8 cache come as bytes, `FP8` says of which format."""
    # a return does not end what is compiled: what must not be compiled stands in an else
    if FP8 is None:
        return x
    elif FP8 == "e5m2":
        # the upper half of an fp16
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(KIND)
    elif tl.target_info.cuda_capability_geq(8, 9):
        return x.to(tl.float8e4nv, bitcast=True).to(KIND)
    else:
        # exponents of fp16 are 8 larger; the code without infinity has NaN at the top
        x = x.to(tl.uint16)
        value = (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256
        return tl.where((x & 0x7F) == 0x7F, float("nan"), value).to(KIND)


@triton.jit
def _context_tile(
    start, low, end, table, k, k_page, k_row, v, v_page, v_row, pages, d,
    N: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ONE_PAGE: tl.constexpr,
    FP8_K: tl.constexpr, FP8_V: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """K and V `[N, D]` of table rows from `start`, zero where unseen; seen `[N]` is what is mapped in [low, end)."""
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
    mask = seen[:, None]
    if d.shape[0] != D:
        mask = mask & (d < D)[None, :]
    k_at = k + (page * k_page + offset.to(tl.int64) * k_row)[:, None] + d[None, :]
    v_at = v + (page * v_page + offset.to(tl.int64) * v_row)[:, None] + d[None, :]
    tile_k = _decoded(tl.load(k_at, mask=mask, other=0), FP8_K, KIND)
    return tile_k, _decoded(tl.load(v_at, mask=mask, other=0), FP8_V, KIND), seen


@triton.jit
def _add_block(
    q, top, total, acc, slot, d, ctx, length, table, k, k_page, k_row, v, v_page, v_row, pages, factor,
    dense_k, dense_k_row, dense_v, dense_v_row, rows, slots, window,
    D: tl.constexpr, P: tl.constexpr, NB: tl.constexpr, CAUSAL: tl.constexpr, BY_QUERY: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FP8_K: tl.constexpr, FP8_V: tl.constexpr,
):  # fmt: skip
    """The state with the block's rows added; dense_k is None: they are in the cache."""
    own = slot + (rows - slots)  # [M] block row of each query
    # what the compiler could lift out of this loop and the one over the context does not fit the registers (28 to 96
    # bytes spilled of 64 rows with fp8 keys at D = 256)
    for start in tl.range(0, length, NB, disable_licm=True):
        row = start + tl.arange(0, NB)
        if dense_k is None:
            tile_k, tile_v, seen = _context_tile(
                ctx + start, ctx, ctx + length, table, k, k_page, k_row, v, v_page, v_row, pages, d,
                NB, D, P, False, FP8_K, FP8_V, q.dtype,
            )  # fmt: skip
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
        top, total, acc = add_tile(q, tile_k, tile_v, seen, top, total, acc, factor, SCALE, CAP, CAUSAL or BY_QUERY)
    return top, total, acc


@triton.jit
def _times(acc, factor, top):
    """`acc` in the values' scale; where nothing was seen a factor that is not finite changes nothing."""
    return tl.where((top != NEG_INF)[:, None], acc * factor, acc)


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
    FP8_K: tl.constexpr, FP8_V: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of the context of one request and kv head, for M of its S * GROUP query rows; the first adds the block.

    A chunk is summed in parts of FINE rows, each from nothing, that are merged in order: the bits do not show how many
    of them a chunk has. A request of one chunk is written at once.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    tiles = tl.cdiv(slots * GROUP, M)
    pid = tl.program_id(0)
    tile, pid = pid % tiles, pid // tiles
    head, pid = pid % heads, pid // heads
    split, b = pid % splits, (pid // splits).to(tl.int64)
    ctx, length, low, base = request(
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
    top = tl.full((M,), NEG_INF, kind)
    total = tl.zeros((M,), kind)
    acc = tl.zeros((M, DP), kind)
    sum_top, sum_total, sum_acc = top, total, acc
    if split == 0:
        if block_k_ptr is None:
            top, total, acc = _add_block(
                q, top, total, acc, slot, d, ctx, length, table, k, k_page, k_row, v, v_page, v_row, pages, k_factor,
                None, 0, None, 0, rows, slots, window, D, P, NB, CAUSAL, BY_QUERY, SCALE, CAP, FP8_K, FP8_V,
            )  # fmt: skip
        else:
            top, total, acc = _add_block(
                q, top, total, acc, slot, d, ctx, length, table, k, k_page, k_row, v, v_page, v_row, pages, None,
                block_k_ptr + b * block_k_b + head64 * block_k_h, block_k_row,
                block_v_ptr + b * block_v_b + head64 * block_v_h, block_v_row,
                rows, slots, window, D, P, NB, CAUSAL, BY_QUERY, SCALE, CAP, FP8_K, FP8_V,
            )  # fmt: skip
        # the factor is the cache's alone; and without rows of the first part the block is all of it
        apart: tl.constexpr = v_factor is not None and block_k_ptr is not None
        if apart or begin >= base + FINE:
            if v_factor is not None and block_k_ptr is None:
                acc = _times(acc, v_factor, top)
            sum_top, sum_total, sum_acc = top, total, acc
            top = tl.full((M,), NEG_INF, kind)
            total = tl.zeros((M,), kind)
            acc = tl.zeros((M, DP), kind)
    if BY_QUERY:
        # rows from `edge` on are seen by every query; those before are no more than the part that starts at `base`
        edge = tl.minimum(ctx + rows - window, end)
        first = ctx + rows - slots - window + 1
        for start in range(begin, edge, N):
            tile_k, tile_v, seen = _context_tile(
                start, low, end, table, k, k_page, k_row, v, v_page, v_row, pages, d,
                N, D, P, ONE_PAGE, FP8_K, FP8_V, q.dtype,
            )  # fmt: skip
            seen = seen[None, :] & ((start + tl.arange(0, N))[None, :] >= (first + slot)[:, None])
            top, total, acc = add_tile(q, tile_k, tile_v, seen, top, total, acc, k_factor, SCALE, CAP, True)
            begin = start + N
    for start in tl.range(begin, end, N, num_stages=STAGES, disable_licm=True):
        tile_k, tile_v, seen = _context_tile(
            start, low, end, table, k, k_page, k_row, v, v_page, v_row, pages, d,
            N, D, P, ONE_PAGE, FP8_K, FP8_V, q.dtype,
        )  # fmt: skip
        top, total, acc = add_tile(q, tile_k, tile_v, seen[None, :], top, total, acc, k_factor, SCALE, CAP, False)
        if (start + N - base) % FINE == 0:
            if v_factor is not None:
                acc = _times(acc, v_factor, top)
            sum_top, sum_total, sum_acc = merged(sum_top, sum_total, sum_acc, top, total, acc)
            top = tl.full((M,), NEG_INF, kind)
            total = tl.zeros((M,), kind)
            acc = tl.zeros((M, DP), kind)
    if v_factor is not None:
        acc = _times(acc, v_factor, top)
    sum_top, sum_total, sum_acc = merged(sum_top, sum_total, sum_acc, top, total, acc)
    alone = True if acc_ptr is None else ctx - base <= chunk
    # the same rows once more: what the compiler could share with the load of q would stay in registers all the way (72
    # bytes spilled on sm_80); it cannot tell that there are fewer than 2 ** 30 splits
    row = (tile + (splits >> 30)) * M + tl.arange(0, M)
    live = row < slots * GROUP
    if alone:
        finish(
            sum_top, sum_total, sum_acc, live, row, d, b, head, sink_ptr, out_ptr, out_b, out_s, out_h, out_d,
            lse_ptr, lse_b, lse_s, lse_h, D, GROUP,
        )  # fmt: skip
    if acc_ptr is not None and not alone:
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
    """The splits of one request and kv head, for R query rows, merged in order: PER at a time, then these sums."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    tiles = tl.cdiv(slots * GROUP, R)
    pid = tl.program_id(0)
    tile, pid = pid % tiles, pid // tiles
    head, b = pid % heads, (pid // heads).to(tl.int64)
    ctx, _, low, base = request(b, ctx_ptr, valid_ptr, length_ptr, capacity, rows, slots, window, IN_CACHE, BY_QUERY)
    if ctx - base <= chunk:
        return
    first = (low - base) // chunk
    last = tl.where(low < ctx, tl.cdiv(ctx - base, chunk), 1)
    row = tile * R + tl.arange(0, R)
    live = row < slots * GROUP
    d = tl.arange(0, DP)
    mask = live[:, None] & (d < D)[None, :]
    none = tl.full((R,), NEG_INF, kind)
    zero = tl.zeros((R,), kind)
    zeros = tl.zeros((R, DP), kind)
    sum_top, sum_total, sum_acc = none, zero, zeros
    for start in range(0, last, PER):
        top, total, acc = none, zero, zeros
        for i in tl.static_range(PER):
            split = start + i
            # split 0 holds the block, wherever the context begins
            used = live & (((split >= first) & (split < last)) | (split == 0))
            at = ((b * heads + head) * splits + split) * (slots * GROUP) + row
            next_top = tl.load(top_ptr + at, mask=used, other=NEG_INF)
            next_total = tl.load(total_ptr + at, mask=used, other=0.0)
            next_acc = tl.load(acc_ptr + at[:, None] * D + d[None, :], mask=mask & used[:, None], other=0.0)
            top, total, acc = merged(top, total, acc, next_top, next_total, next_acc)
        sum_top, sum_total, sum_acc = merged(sum_top, sum_total, sum_acc, top, total, acc)
    finish(
        sum_top, sum_total, sum_acc, live, row, d, b, head, sink_ptr, out_ptr, out_b, out_s, out_h, out_d,
        lse_ptr, lse_b, lse_s, lse_h, D, GROUP,
    )  # fmt: skip
