"""States of the online softmax, and what one request's lengths make visible: device functions of kernels.py.

Scores are in units of log2. A state of some keys is `(top, total, acc)`: the greatest score `[M]`, the sum of
`2 ** (score - top)` `[M]`, and the same sum weighted by V `[M, D]`; top is -inf while no key was visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # top of keys that are visible and score -inf


@triton.jit
def request(
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
def add_tile(
    q, k, v, seen, top, total, acc, factor, SCALE: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr
):  # [M, D], [N, D] x2, [M or 1, N], [M] x2, [M, D]
    """The state after one tile of keys; rows that no query sees are zero in k and v. RAGGED: masks differ by query."""
    if RAGGED:
        # 0 * NaN must not reach the queries that do not see the row
        bad = tl.where(tl.abs(v.to(acc.dtype)) < float("inf"), 0, 1)
        lane = tl.arange(0, v.shape[0])
        # rare; key by key and before the products it takes few registers, and a sum that is NaN stays so
        for i in range(0, tl.max(tl.max(bad, axis=1) * (lane + 1), axis=0)):
            sees = tl.max(tl.where(lane[None, :] == i, seen.to(tl.int32), 0), axis=1)
            taints = tl.max(tl.where(lane[:, None] == i, bad, 0), axis=0)
            acc = tl.where((sees[:, None] * taints[None, :]) > 0, float("nan"), acc)
        v = tl.where(bad == 0, v, 0.0)
    score = tl.dot(q, tl.trans(k), out_dtype=acc.dtype, input_precision="ieee")
    if factor is not None:
        score = score * factor
    score = score * SCALE if CAP is None else _tanh(score * SCALE) * CAP
    score = tl.where(seen, score, NEG_INF)
    some = tl.max(seen.to(tl.int32), axis=1) > 0
    peak = tl.maximum(tl.max(score, axis=1), tl.where(some, _LOWEST, NEG_INF))
    new = tl.maximum(top, peak)
    shift = tl.where(new == NEG_INF, 0.0, new)
    weight = tl.exp2(score - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weight, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, out_dtype=acc.dtype, input_precision="ieee")
    return new, total, acc


@triton.jit
def merged(top_a, total_a, acc_a, top_b, total_b, acc_b):
    """The state of both sets of keys; one of no key changes no bit of the other."""
    top = tl.maximum(top_a, top_b)
    shift = tl.where(top == NEG_INF, 0.0, top)
    a = tl.exp2(top_a - shift)
    b = tl.exp2(top_b - shift)
    return top, total_a * a + total_b * b, acc_a * a[:, None] + acc_b * b[:, None]


@triton.jit
def finish(
    top, total, acc, live, row, d, b, head,
    sink_ptr, out_ptr, out_b, out_s, out_h, out_d, lse_ptr, lse_b, lse_s, lse_h,
    D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the rows of a final state; without a key 0 and -inf."""
    heads = head * GROUP + row % GROUP
    empty = top == NEG_INF
    if sink_ptr is not None:
        extra = tl.load(sink_ptr + heads, mask=live, other=0.0).to(acc.dtype) * (1.0 / _LN2)
        joint = tl.maximum(top, extra)
        shift = tl.where(joint == NEG_INF, 0.0, joint)
        decay = tl.exp2(top - shift)
        total = total * decay + tl.exp2(extra - shift)
        acc = acc * decay[:, None]
        top = joint
    # + 0.0: merging with nothing turns -0.0 into 0.0, and whether that was done must not show
    value = tl.where(empty[:, None], 0.0, (acc + 0.0) / total[:, None])
    log = tl.where(empty, NEG_INF, (top + tl.log2(total)) * _LN2)
    slot = (row // GROUP).to(tl.int64)
    at = tl.cast(b, tl.int64) * out_b + slot * out_s + heads.to(tl.int64) * out_h
    mask = live[:, None] & (d < D)[None, :]
    tl.store(out_ptr + at[:, None] + d.to(tl.int64)[None, :] * out_d, value.to(out_ptr.dtype.element_ty), mask=mask)
    at = tl.cast(b, tl.int64) * lse_b + slot * lse_s + heads.to(tl.int64) * lse_h
    tl.store(lse_ptr + at, log, mask=live)
