"""Triton kernels of T1 preparation: everything after the selection of T1."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.lm_head.reference import UNCERTIFIED

_UNCERTIFIED = tl.constexpr(UNCERTIFIED)
# requests of one program: with it fixed, the bits of a request do not depend on how many there are
REQUESTS = tl.constexpr(8)
# Streams are projected before their norm is known. A value of 2**64 or more makes the mean square infinite and the norm
# zero; until then it must not overflow. Tensor cores get all values this much smaller, FMAs only such values.
_LARGE = tl.constexpr(2.0**64)
_SHRINK = tl.constexpr(2.0**-32)
_GROW = tl.constexpr(2.0**32)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _scaled(x, factor, SCALED: tl.constexpr):
    """`x * factor` rounded to the dtype of x."""
    if SCALED:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    return x


@triton.jit
def _added(plain, delta):
    """`plain + delta` in the dtype of plain; an element whose delta is zero or not finite keeps its bits."""
    total = (plain.to(tl.float32) + delta).to(plain.dtype)
    return tl.where((delta != 0) & _finite(delta), total, plain)


@triton.jit
def _high(x):
    """x cut to the bits that bf16 holds, as float32."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(w, x, acc):
    """Tensor cores: w `[S, R, D]` 16 bits, x `[S, N, D]` fp32 in two bf16 parts, so 16 significant bits of it."""
    high = _high(x)
    parts = tl.permute(high.to(tl.bfloat16), (0, 2, 1)), tl.permute((x - high).to(tl.bfloat16), (0, 2, 1))
    if w.dtype == tl.bfloat16:
        acc = tl.dot(w, parts[1], acc)
        return tl.dot(w, parts[0], acc)
    # fp16 is the sum of two bf16
    wide = w.to(tl.float32)
    top = _high(wide)
    rest = (wide - top).to(tl.bfloat16)
    acc = tl.dot(rest, parts[1], acc)
    acc = tl.dot(rest, parts[0], acc)
    acc = tl.dot(top.to(tl.bfloat16), parts[1], acc)
    return tl.dot(top.to(tl.bfloat16), parts[0], acc)


@triton.jit
def _project(
    rows, live, size,  # [N] pointers to the vectors, [N]
    norm_ptr, offset, factor,  # [size]; None: the vectors are projected as they are
    matrix, inside,  # [R] pointers to the matrix rows at the stream's first column, [R]
    R: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr, TENSOR_CORES: tl.constexpr,
    SPLITS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`matrix @ x * norm` `[R, N]` and sums of squares `[N]`; every program adds the squares in the same order."""
    N: tl.constexpr = REQUESTS
    column = (tl.arange(0, SPLITS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :])[:, None, :]
    x_ptrs = rows[None, :, None] + column
    w_ptrs = matrix[None, :, None] + column
    norm_ptrs = None if norm_ptr is None else norm_ptr + column
    squares = tl.zeros((SPLITS, N, DEPTH), tl.float32)
    acc = tl.zeros((SPLITS, R, N), tl.float32) if TENSOR_CORES else tl.zeros((SPLITS, R, N, DEPTH), tl.float32)
    for start in tl.range(0, size, SPLITS * DEPTH, num_stages=STAGES):
        if WHOLE:
            w = tl.load(w_ptrs + start)
            x = tl.load(x_ptrs + start, mask=live[None, :, None], other=0.0)
        else:
            valid = start + column < size
            w = tl.load(w_ptrs + start, mask=inside[None, :, None] & valid, other=0.0)
            x = tl.load(x_ptrs + start, mask=live[None, :, None] & valid, other=0.0)
        x = _scaled(x, factor, SCALED).to(tl.float32)
        if norm_ptrs is not None:
            squares = tl.fma(x, x, squares)
            norm = tl.load(norm_ptrs + start) if WHOLE else tl.load(norm_ptrs + start, mask=valid, other=0.0)
            norm = norm.to(tl.float32)
            if TENSOR_CORES:
                x *= tl.fma(norm, _SHRINK, offset * _SHRINK)
            else:
                x = tl.where((tl.abs(x) >= _LARGE) & _finite(x), x * _SHRINK * _SHRINK, x) * (norm + offset)
        if TENSOR_CORES:
            acc = _multiply(w, x, acc)
        else:
            wide = tl.broadcast_to(w.to(tl.float32)[:, :, None, :], acc.shape)
            acc = tl.fma(wide, tl.broadcast_to(x[:, None, :, :], acc.shape), acc)
    if not TENSOR_CORES:
        acc = tl.sum(acc, 3)
    return tl.sum(acc, 0), tl.sum(tl.sum(squares, 2), 0)


@triton.jit
def _norm(squares, size, eps, TENSOR_CORES: tl.constexpr):
    """The factor of the norm `[N]`, and whether the mean square is finite `[N]`."""
    mean = tl.div_rn(squares, tl.cast(size, tl.float32))
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    return factor * _GROW if TENSOR_CORES else factor, _finite(mean)


@triton.jit
def _tokens(anchor, value, status, num_embeddings, KEYS: tl.constexpr):
    """Anchor and T1 `[N]`, -1 where they are missing or outside the table, and whether T1 is proved."""
    token = value.to(tl.int64)
    proved = token == token
    if KEYS:
        token = (~token).to(tl.int32).to(tl.int64)
        proved = (status & _UNCERTIFIED) == 0
    anchor = anchor.to(tl.int64)
    t1 = tl.where((anchor >= 0) & (token >= 0) & (token < num_embeddings), token, -1)
    return tl.where(anchor < num_embeddings, tl.maximum(anchor, -1), -1), t1, proved


@triton.jit
def _place(token, start, rows):
    """Row of the shard, clamped so that it may be read `[N]`, and whether it is the token's own."""
    local = token - start
    return tl.minimum(tl.maximum(local, 0), rows - 1), (token >= 0) & (local >= 0) & (local < rows)


@triton.jit(do_not_specialize=["status_stride", "table_rows", "batch", "rank", "start", "num_embeddings"])
def t1_prep_down_kernel(
    anchor_ptr, t1_ptr, status_ptr, status_stride,  # [B], [B] int64 keys, [B]; or token ids and None
    hidden_ptr, hidden_stride, hidden_size,  # [B, H]
    table_ptr, table_stride, table_rows, width,  # [Ve, E]
    down_ptr, down_stride, hidden_column,  # [r, E + H] or [r, H]
    norm_e_ptr, norm_m_ptr, eps_e, eps_m, offset_e, offset_m, factor,  # [E] or None: the hidden state alone, [H]
    low_ptr, low_stride, finite_ptr,  # [B, r] fp32 out, [B] int32 out
    batch, rank, start, num_embeddings,
    SCALED: tl.constexpr, WHOLE: tl.constexpr, TENSOR_CORES: tl.constexpr,
    R: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`down @ [RMS_e(e); RMS_m(h)]` of 8 requests, R of its rows."""
    b = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    r = tl.program_id(1).to(tl.int64) * R + tl.arange(0, R)
    live, inside = b < batch, r < rank
    anchor = tl.load(anchor_ptr + b, mask=live, other=-1)
    value = tl.load(t1_ptr + b, mask=live, other=-1)
    status = anchor if status_ptr is None else tl.load(status_ptr + b * status_stride, mask=live, other=0)

    matrix = down_ptr + r * down_stride
    dots, squares = _project(
        hidden_ptr + b * hidden_stride, live, hidden_size, norm_m_ptr, offset_m, factor, matrix + hidden_column,
        inside, R, False, WHOLE, TENSOR_CORES, SPLITS, DEPTH, STAGES,
    )  # fmt: skip
    scale, finite = _norm(squares, hidden_size, eps_m, TENSOR_CORES)
    low = dots * scale[None, :]
    if norm_e_ptr is not None:
        _, t1, _ = _tokens(anchor, value, status, num_embeddings, status_ptr is not None)
        row, _ = _place(t1, start, table_rows)
        dots, squares = _project(
            table_ptr + row * table_stride, live, width, norm_e_ptr, offset_e, factor, matrix,
            inside, R, SCALED, WHOLE, TENSOR_CORES, SPLITS, DEPTH, STAGES,
        )  # fmt: skip
        scale, finite_e = _norm(squares, width, eps_e, TENSOR_CORES)
        low += dots * scale[None, :]
        finite &= finite_e
    tl.store(low_ptr + b[None, :] * low_stride + r[:, None], low, mask=live[None, :] & inside[:, None])
    tl.store(finite_ptr + b, finite.to(tl.int32), mask=live & (tl.program_id(1) == 0))


@triton.jit(
    do_not_specialize=[
        "status_stride", "table_rows", "t1_out_stride", "ids_stride", "ids_slot_stride", "certified_stride",
        "batch", "mask_id", "num_masks", "start", "num_embeddings",
    ]
)  # fmt: skip
def t1_prep_tail_kernel(
    anchor_ptr, t1_ptr, status_ptr, status_stride,  # [B], [B] int64 keys, [B]; or token ids and None
    hidden_ptr, hidden_stride, hidden_size,  # [B, H]; fp32 [B, r] when FACTORED
    table_ptr, table_stride, table_rows, width, folded_ptr, folded_stride, mask_ptr,  # [Ve, E]; [Ve, E], [E] or None
    matrix_ptr, matrix_stride, hidden_column,  # [E, E + H], [E, H] or [E, r]; None: the plain block
    norm_e_ptr, norm_m_ptr, eps_e, eps_m, offset_e, offset_m, factor,  # [E], [H]; None: not projected, not normed
    finite_ptr,  # [B] int32 when FACTORED
    t1_out_ptr, t1_out_stride, ids_ptr, ids_stride, ids_slot_stride,  # [B] and [B, S] int64 out
    block_ptr, block_stride, block_slot_stride, certified_ptr, certified_stride,  # [B, S, E] and uint8 [B] out
    batch, mask_id, num_masks, start, num_embeddings,
    ANCHORS: tl.constexpr, REPLACE: tl.constexpr, AT_MASKS: tl.constexpr, FACTORED: tl.constexpr,
    SCALED: tl.constexpr, WHOLE: tl.constexpr, TENSOR_CORES: tl.constexpr,
    R: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The block of 8 requests, R of its columns; the programs of column 0 write ids and flags too."""
    b = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    c = tl.program_id(1).to(tl.int64) * R + tl.arange(0, R)
    live, inside = b < batch, c < width
    both = live[:, None] if WHOLE else live[:, None] & inside[None, :]
    anchor = tl.load(anchor_ptr + b, mask=live, other=-1)
    value = tl.load(t1_ptr + b, mask=live, other=-1)
    status = anchor if status_ptr is None else tl.load(status_ptr + b * status_stride, mask=live, other=0)
    named = anchor >= 0
    anchor, t1, proved = _tokens(anchor, value, status, num_embeddings, status_ptr is not None)
    finite = live
    if matrix_ptr is not None:
        # the hidden state does not wait for T1's row
        matrix = matrix_ptr + c * matrix_stride
        dots, squares = _project(
            hidden_ptr + b * hidden_stride, live, hidden_size, norm_m_ptr, offset_m, factor, matrix + hidden_column,
            inside, R, False, WHOLE, TENSOR_CORES, SPLITS, DEPTH, STAGES,
        )  # fmt: skip
        if FACTORED:
            finite = tl.load(finite_ptr + b, mask=live, other=0) != 0
        else:
            scale, finite = _norm(squares, hidden_size, eps_m, TENSOR_CORES)
            dots *= scale[None, :]

    row, owned = _place(t1, start, table_rows)
    plain = _scaled(tl.load(table_ptr + row[:, None] * table_stride + c[None, :], mask=both, other=0), factor, SCALED)
    base = plain
    if folded_ptr is not None:
        base = tl.load(folded_ptr + row[:, None] * folded_stride + c[None, :], mask=both, other=0)
    if ANCHORS == 2:
        anchor_row, anchor_owned = _place(anchor, start, table_rows)
        at = table_ptr + anchor_row[:, None] * table_stride + c[None, :]
        first = _scaled(tl.load(at, mask=both, other=0), factor, SCALED)
    mask_row, mask_owned = _place(tl.cast(mask_id, tl.int64), start, table_rows)
    if mask_ptr is not None:
        mask = (tl.load(mask_ptr + c) if WHOLE else tl.load(mask_ptr + c, mask=inside, other=0)).to(plain.dtype)
    else:
        mask = tl.load(table_ptr + mask_row * table_stride + c, mask=inside, other=0)
    mask = tl.broadcast_to(_scaled(mask, factor, SCALED)[None, :], (REQUESTS, R))

    if norm_e_ptr is not None:
        more, squares = _project(
            table_ptr + row * table_stride, live, width, norm_e_ptr, offset_e, factor, matrix,
            inside, R, SCALED, WHOLE, TENSOR_CORES, SPLITS, DEPTH, STAGES,
        )  # fmt: skip
        scale, finite_e = _norm(squares, width, eps_e, TENSOR_CORES)
        dots += more * scale[None, :]
        finite &= finite_e
    if matrix_ptr is not None:
        delta = tl.trans(dots)  # [N, R]
        if AT_MASKS:
            mask = _added(mask, delta)
        elif REPLACE:
            whole = delta if folded_ptr is None else base.to(tl.float32) + delta
            plain = tl.where(_finite(delta), whole.to(plain.dtype), plain)
        else:
            plain = _added(base, delta).to(plain.dtype)

    block = block_ptr + b[:, None] * block_stride + c[None, :]
    if ANCHORS == 2:
        tl.store(block, tl.where(anchor_owned[:, None], first, tl.zeros_like(first)), mask=both)
        block += block_slot_stride
    tl.store(block, tl.where(owned[:, None], plain, tl.zeros_like(plain)), mask=both)
    mask = tl.where((named & mask_owned)[:, None], mask, tl.zeros_like(mask))
    for _ in range(num_masks):
        block += block_slot_stride
        tl.store(block, mask, mask=both)
    if tl.program_id(1) == 0:
        tl.store(t1_out_ptr + b * t1_out_stride, t1, mask=live)
        certified = proved & (t1 >= 0) & (anchor >= 0) & finite
        tl.store(certified_ptr + b * certified_stride, certified.to(tl.uint8), mask=live)
        ids = ids_ptr + b * ids_stride
        if ANCHORS == 2:
            tl.store(ids, anchor, mask=live)
            ids += ids_slot_stride
        tl.store(ids, t1, mask=live)
        fill = tl.where(named, tl.cast(mask_id, tl.int64), -1)
        for _ in range(num_masks):
            ids += ids_slot_stride
            tl.store(ids, fill, mask=live)
