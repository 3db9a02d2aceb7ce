"""Triton kernels of the sampled rules that read rows of logits and drafts, and the scratch memory they share.

Scratch is int64 words; a float64 is kept as its bits. Sections, each field contiguous: per request, per verify row, per
part of a row, per part of a request's last row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.sample.kernels_draw import FAR, key_of, log_weight, logits_at

# fields of a request
KEPT, USABLE, REFUSED, FLAGS, TOKEN, SCALE = (tl.constexpr(i) for i in range(6))
# fields of a row: largest logit, sum of masses, product of ratios before it, sum of the draft
TOP, TOTAL, RATIO, DRAFT = (tl.constexpr(i) for i in range(4))
# fields of a part of a row; the last is of block verification
P_TOP, P_SUM, P_FIRST, P_NAN, P_DRAFT, P_BAD, P_SURPLUS = (tl.constexpr(i) for i in range(7))
# fields of a part of the race: over the residual, and over the target where a part has no residual
SCORE, WINNER, SCORE_ALL, WINNER_ALL = (tl.constexpr(i) for i in range(4))
WORDS = (6, 4, 7, 4)

_REQUEST, _ROW, _PART = tl.constexpr(6), tl.constexpr(4), tl.constexpr(7)


@triton.jit
def of_request(memory, batch, field, request):
    return memory + field * batch + request


@triton.jit
def of_row(memory, batch, rows, field, row):
    return memory + (_REQUEST + field * rows) * batch + row


@triton.jit
def of_part(memory, batch, rows, splits, field, part):
    return memory + (_REQUEST + rows * (_ROW + field * splits)) * batch + part


@triton.jit
def of_race(memory, batch, rows, splits, field, part):
    return memory + (_REQUEST + rows * (_ROW + _PART * splits) + field * splits) * batch + part


@triton.jit
def load_wide(ptr):
    return tl.load(ptr).to(tl.float64, bitcast=True)


@triton.jit
def store_wide(ptr, value):
    tl.store(ptr, value.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit
def request_of(request, rows, temperature_ptr, top_p_ptr, budget_ptr, count_ptr):
    """Temperature, candidates proposed (negative: inert), whether the request has a budget, whether it is decided."""
    temperature = tl.load(temperature_ptr + request).to(tl.float64)
    limit = tl.full([], 0, tl.int64) + rows - 1
    if count_ptr is not None:
        limit = tl.minimum(limit, tl.load(count_ptr + request).to(tl.int64))
    given = (limit >= 0) & (tl.load(budget_ptr + request) > 0)
    good = (temperature >= 0) & (temperature < float("inf"))
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + request)
        good = good & ((top_p == top_p) | (temperature == 0))
    return temperature, limit, given, good


@triton.jit
def masses(
    row_ptr, index, vocab, top, temperature, cut_key_ptr, cut_id_ptr, row, DROP: tl.constexpr, FP64: tl.constexpr
):
    """exp((x - top) / temperature) of what the cut keeps; rows with NaN do not come here."""
    x, _ = logits_at(row_ptr, index, vocab, FP64)
    mass = tl.exp(log_weight(x.to(tl.float64), top, temperature))
    if cut_key_ptr is not None:
        key, cut = key_of(x, DROP).to(tl.uint64), tl.load(cut_key_ptr + row)
        mass = tl.where((key > cut) | ((key == cut) & (index <= tl.load(cut_id_ptr + row))), mass, 0.0)
    return mass


@triton.jit
def draft_of(index, start, total, drawn, probs_ptr, ids_ptr, vocab, listed, N: tl.constexpr, L: tl.constexpr):
    """q of N ids from `start`: `probs_ptr` and `ids_ptr` are of one row; None: one-hot, dense."""
    if probs_ptr is None:
        return tl.where(index == drawn, 1.0, 0.0).to(tl.float64)
    elif ids_ptr is None:
        return tl.load(probs_ptr + index, mask=index < vocab, other=0.0).to(tl.float64) / total
    else:
        entry = tl.arange(0, L)
        ids = tl.load(ids_ptr + entry, mask=entry < listed, other=-1).to(tl.int64)
        inside = (ids >= start) & (ids < start + N)
        probs = tl.load(probs_ptr + entry, mask=inside, other=0.0).to(tl.float64)
        q = tl.zeros([N], tl.float64)
        last = start - 1
        # a tile holds few of the list: one after the other, equal ids together
        for _ in range(tl.sum(inside.to(tl.int32), axis=0)):
            last = tl.min(tl.where(inside & (ids > last), ids, FAR), axis=0)
            q = tl.where(index == last, tl.sum(tl.where(ids == last, probs, 0.0), axis=0), q)
        return q / total


@triton.jit(do_not_specialize=["batch", "rows", "splits"])
def accept_rows_kernel(
    logits_ptr, logits_stride, logits_row_stride,  # [B, R, V]
    temperature_ptr, top_p_ptr, budget_ptr, count_ptr,  # [B] x4; top_p_ptr, count_ptr may be None
    probs_ptr, probs_stride, probs_row_stride,  # [B, K, V] of a dense draft, or None
    cut_key_ptr, cut_id_ptr,  # [B, R] x2, or None
    memory_ptr, batch, rows, splits, vocab,
    DROP: tl.constexpr, FP64: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N entries of a verify row: their largest, its lowest id, their mass, and the sum of the draft's."""
    part = tl.program_id(0).to(tl.int64)
    row, split = part // splits, part % splits
    request, j = row // rows, row % rows
    temperature, limit, given, good = request_of(request, rows, temperature_ptr, top_p_ptr, budget_ptr, count_ptr)
    if given & good & (j <= limit):
        start = split * N
        index = start + tl.arange(0, N)
        row_ptr = logits_ptr + request * logits_stride + j * logits_row_stride
        x, nan = logits_at(row_ptr, index, vocab, FP64)
        top = tl.max(x, axis=0)
        first = tl.min(tl.where(x == top, index, FAR), axis=0)
        total = tl.full([], 0.0, tl.float64)
        if (temperature > 0) & (top > -float("inf")) & (top < float("inf")):
            mass = tl.exp(log_weight(x.to(tl.float64), top.to(tl.float64), temperature))
            if cut_key_ptr is not None:
                key, cut = key_of(x, DROP).to(tl.uint64), tl.load(cut_key_ptr + row)
                mass = tl.where((key > cut) | ((key == cut) & (index <= tl.load(cut_id_ptr + row))), mass, 0.0)
            total = tl.sum(mass, axis=0)
        store_wide(of_part(memory_ptr, batch, rows, splits, P_TOP, part), top)
        store_wide(of_part(memory_ptr, batch, rows, splits, P_SUM, part), total)
        tl.store(of_part(memory_ptr, batch, rows, splits, P_FIRST, part), first)
        tl.store(of_part(memory_ptr, batch, rows, splits, P_NAN, part), tl.max(nan.to(tl.int64), axis=0))
        if probs_ptr is not None:  # noqa: SIM102, only the outer one is known when the kernel is compiled
            if (temperature > 0) & (j < limit):
                draft_ptr = probs_ptr + request * probs_stride + j * probs_row_stride
                q = tl.load(draft_ptr + index, mask=index < vocab, other=0.0).to(tl.float64)
                store_wide(of_part(memory_ptr, batch, rows, splits, P_DRAFT, part), tl.sum(q, axis=0))
                # a NaN shows in the sum
                bad = tl.max((q < 0).to(tl.int64), axis=0)
                tl.store(of_part(memory_ptr, batch, rows, splits, P_BAD, part), bad)


@triton.jit(do_not_specialize=["batch", "rows", "splits", "listed"])
def accept_surplus_kernel(
    candidates_ptr, candidates_stride, logits_ptr, logits_stride, logits_row_stride,
    temperature_ptr, top_p_ptr, budget_ptr, count_ptr,
    probs_ptr, probs_stride, probs_row_stride, ids_ptr, ids_stride, ids_row_stride, listed,
    cut_key_ptr, cut_id_ptr,
    memory_ptr, batch, rows, splits, vocab,
    DROP: tl.constexpr, FP64: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Block verification: sum of max(P_i p_i - q_i, 0) over N entries of rows 1..K-1."""
    program = tl.program_id(0).to(tl.int64)
    split = program % splits
    request, j = program // splits // (rows - 2), program // splits % (rows - 2) + 1
    row = request * rows + j
    temperature, _, given, good = request_of(request, rows, temperature_ptr, top_p_ptr, budget_ptr, count_ptr)
    # the number of usable candidates is written only for these
    if given & good & (temperature > 0):  # noqa: SIM102
        if j < tl.load(of_request(memory_ptr, batch, USABLE, request)):
            start = split * N
            index = start + tl.arange(0, N)
            top = load_wide(of_row(memory_ptr, batch, rows, TOP, row))
            total = load_wide(of_row(memory_ptr, batch, rows, TOTAL, row))
            ratio = load_wide(of_row(memory_ptr, batch, rows, RATIO, row))
            draft = load_wide(of_row(memory_ptr, batch, rows, DRAFT, row))
            row_ptr = logits_ptr + request * logits_stride + j * logits_row_stride
            mass = masses(row_ptr, index, vocab, top, temperature, cut_key_ptr, cut_id_ptr, row, DROP, FP64)
            drawn = tl.load(candidates_ptr + request * candidates_stride + j + 1).to(tl.int64)
            q_ptr = probs_ptr + request * probs_stride + j * probs_row_stride
            list_ptr = None if ids_ptr is None else ids_ptr + request * ids_stride + j * ids_row_stride
            q = draft_of(index, start, draft, drawn, q_ptr, list_ptr, vocab, listed, N, L)
            surplus = tl.sum(tl.maximum(ratio * (mass / total) - q, 0.0), axis=0)
            part = row * splits + split
            store_wide(of_part(memory_ptr, batch, rows, splits, P_SURPLUS, part), surplus)
