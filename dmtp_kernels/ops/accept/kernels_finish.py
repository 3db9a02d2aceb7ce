"""Triton kernels of the sampled rules that decide: what is kept, the race for the next token, what is emitted."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.accept.kernels import emit
from dmtp_kernels.ops.accept.kernels_rows import (
    DRAFT,
    FLAGS,
    KEPT,
    P_BAD,
    P_DRAFT,
    P_FIRST,
    P_NAN,
    P_SUM,
    P_SURPLUS,
    P_TOP,
    RATIO,
    REFUSED,
    SCALE,
    SCORE,
    SCORE_ALL,
    TOKEN,
    TOP,
    TOTAL,
    USABLE,
    WINNER,
    WINNER_ALL,
    draft_of,
    load_wide,
    masses,
    of_part,
    of_race,
    of_request,
    of_row,
    request_of,
    store_wide,
)
from dmtp_kernels.ops.sample.kernels_draw import FAR, gumbel, key_of, log_weight, lowest_best, word_at, words_from

_NAN, _UNDECIDED, _BAD, _BAD_DRAFT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
_ACCEPT, _RESIDUAL = tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _uniform(index, seed, position):
    return (
        word_at(index, tl.full([], _ACCEPT, tl.uint32), seed, position).to(tl.float64) + 0.5
    ) * 2.3283064365386963e-10


@triton.jit(do_not_specialize=["batch", "rows", "splits", "listed"])
def accept_decide_kernel(
    candidates_ptr, candidates_stride, logits_ptr, logits_stride, logits_row_stride,  # [B, R], [B, R, V]
    temperature_ptr, top_p_ptr, budget_ptr, count_ptr, seed_ptr, position_ptr,  # [B] x6
    probs_ptr, probs_stride, probs_row_stride, ids_ptr, ids_stride, ids_row_stride, listed,  # [B, K, V or N] x2
    cut_key_ptr, cut_id_ptr,
    memory_ptr, batch, rows, splits, vocab,
    BLOCK: tl.constexpr, DROP: tl.constexpr, FP64: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One request: its rows joined from their parts; candidates kept, or for BLOCK the usable ones and their ratios."""
    request = tl.program_id(0).to(tl.int64)
    temperature, limit, given, good = request_of(request, rows, temperature_ptr, top_p_ptr, budget_ptr, count_ptr)
    greedy = temperature == 0
    seed, position = tl.load(seed_ptr + request).to(tl.int64), tl.load(position_ptr + request).to(tl.int64)
    lane = tl.arange(0, W)
    used = lane < splits
    active = given & good
    kept = tl.full([], 0, tl.int64)
    refused = tl.full([], 0, tl.int64)
    token = tl.full([], -1, tl.int64)
    flags = tl.full([], 0, tl.int64)
    ratio = tl.full([], 1.0, tl.float64)
    for j in range(rows):
        if active:
            row = request * rows + j
            at = row * splits + lane
            tops = tl.load(of_part(memory_ptr, batch, rows, splits, P_TOP, at), mask=used, other=0)
            tops = tl.where(used, tops.to(tl.float64, bitcast=True), -float("inf"))
            sums = tl.load(of_part(memory_ptr, batch, rows, splits, P_SUM, at), mask=used, other=0)
            firsts = tl.load(of_part(memory_ptr, batch, rows, splits, P_FIRST, at), mask=used, other=FAR)
            nan = tl.max(tl.load(of_part(memory_ptr, batch, rows, splits, P_NAN, at), mask=used, other=0), axis=0) > 0
            top = tl.max(tops, axis=0)
            best = tl.min(tl.where(tops == top, firsts, FAR), axis=0)
            empty = top == -float("inf")
            undecided = empty | ((greedy == 0) & (nan | (top == float("inf"))))
            proposed = j < limit
            drawn = tl.load(candidates_ptr + request * candidates_stride + j + 1, mask=proposed, other=-1).to(tl.int64)
            proposed = proposed & (drawn >= 0) & (drawn < vocab)
            row_flags = tl.where(nan, _NAN, 0) + tl.where(undecided, _UNDECIDED, 0)
            if greedy:
                flags = flags | row_flags
                token = tl.where(undecided, -1, best)
                active = proposed & (drawn == token)
            else:
                weight = tl.where(tops == -float("inf"), 0.0, tl.exp(log_weight(tops, top, temperature)))
                total = tl.sum(sums.to(tl.float64, bitcast=True) * weight, axis=0)
                store_wide(of_row(memory_ptr, batch, rows, TOP, row), top)
                store_wide(of_row(memory_ptr, batch, rows, TOTAL, row), total)
                store_wide(of_row(memory_ptr, batch, rows, RATIO, row), ratio)
                safe = tl.where(proposed, drawn, 0)
                row_ptr = logits_ptr + request * logits_stride + j * logits_row_stride
                x = tl.load(row_ptr + safe)
                x = x.to(tl.float64) if FP64 else x.to(tl.float32)
                p = tl.exp(log_weight(x.to(tl.float64), top, temperature)) / total
                if cut_key_ptr is not None:
                    key, cut = key_of(x, DROP).to(tl.uint64), tl.load(cut_key_ptr + row)
                    p = tl.where((key > cut) | ((key == cut) & (safe <= tl.load(cut_id_ptr + row))), p, 0.0)
                q = tl.full([], 1.0, tl.float64)
                draft = tl.full([], 1.0, tl.float64)
                wrong = tl.full([], 0, tl.int64)
                if probs_ptr is not None:
                    q_ptr = probs_ptr + request * probs_stride + j * probs_row_stride
                    if ids_ptr is None:
                        here = used & (j < limit)
                        drafts = tl.load(of_part(memory_ptr, batch, rows, splits, P_DRAFT, at), mask=here, other=0)
                        draft = tl.sum(drafts.to(tl.float64, bitcast=True), axis=0)
                        bad = tl.load(of_part(memory_ptr, batch, rows, splits, P_BAD, at), mask=here, other=0)
                        wrong = tl.max(bad, axis=0)
                        q = tl.load(q_ptr + safe, mask=proposed, other=0.0).to(tl.float64)
                    else:
                        entry = tl.arange(0, L)
                        list_ptr = ids_ptr + request * ids_stride + j * ids_row_stride
                        here = (entry < listed) & (j < limit)
                        ids = tl.load(list_ptr + entry, mask=here, other=-1).to(tl.int64)
                        probs = tl.load(q_ptr + entry, mask=ids >= 0, other=0.0).to(tl.float64)
                        draft = tl.sum(probs, axis=0)
                        wrong = tl.max(((probs < 0) | (ids >= vocab)).to(tl.int64), axis=0)
                        q = tl.sum(tl.where(ids == drawn, probs, 0.0), axis=0)
                    wrong = wrong | ((draft > 0) & (draft < float("inf"))).to(tl.int64) ^ 1
                    q = q / draft
                store_wide(of_row(memory_ptr, batch, rows, DRAFT, row), draft)
                usable = proposed & (undecided == 0) & (wrong == 0)
                flags = tl.where(usable, 0, row_flags + tl.where(proposed & (wrong != 0), _BAD_DRAFT, 0)).to(tl.int64)
                if BLOCK:
                    ratio = tl.where(q > 0, tl.minimum(ratio * (p / q), 1.0), 0.0)
                    active = usable
                else:
                    # no division: u < p / q; a candidate that q says cannot be drawn is refused
                    keep = (_uniform(j, seed, position) * q < p) & (q > 0)
                    refused = (usable & (keep == 0)).to(tl.int64)
                    active = usable & keep
            kept += active.to(tl.int64)
    tl.store(of_request(memory_ptr, batch, KEPT, request), kept)
    tl.store(of_request(memory_ptr, batch, USABLE, request), kept)
    tl.store(of_request(memory_ptr, batch, REFUSED, request), refused)
    tl.store(of_request(memory_ptr, batch, FLAGS, request), tl.where(given & (good == 0), _BAD, flags))
    tl.store(of_request(memory_ptr, batch, TOKEN, request), token)
    store_wide(of_request(memory_ptr, batch, SCALE, request), tl.full([], 1.0, tl.float64))


@triton.jit
def _longest(memory_ptr, batch, rows, splits, request, usable, seed, position, W: tl.constexpr):
    """Block verification: the longest prefix whose draw falls below its chance, and its product of ratios."""
    lane = tl.arange(0, W)
    kept = tl.full([], 0, tl.int64)
    scale = tl.full([], 1.0, tl.float64)
    for i in range(1, usable + 1):
        row = request * rows + i
        # the last one is followed by a row too
        ratio = load_wide(of_row(memory_ptr, batch, rows, RATIO, row))
        at = of_part(memory_ptr, batch, rows, splits, P_SURPLUS, row * splits + lane)
        parts = tl.load(at, mask=(lane < splits) & (i < usable), other=0).to(tl.float64, bitcast=True)
        surplus = tl.sum(parts, axis=0)
        below = surplus + 1.0 - ratio
        inner = tl.where(below > 0, surplus / tl.where(below > 0, below, 1.0), 1.0)
        chance = tl.where(i < usable, inner, ratio)
        longer = _uniform(i - 1, seed, position) < chance
        kept = tl.where(longer, i, kept)
        scale = tl.where(longer, ratio, scale)
    return kept, scale


@triton.jit(do_not_specialize=["batch", "rows", "splits", "listed"])
def accept_race_kernel(
    candidates_ptr, candidates_stride, logits_ptr, logits_stride, logits_row_stride,
    temperature_ptr, top_p_ptr, budget_ptr, count_ptr, seed_ptr, position_ptr,
    probs_ptr, probs_stride, probs_row_stride, ids_ptr, ids_stride, ids_row_stride, listed,
    cut_key_ptr, cut_id_ptr,
    memory_ptr, batch, rows, splits, vocab,
    BLOCK: tl.constexpr, DROP: tl.constexpr, FP64: tl.constexpr, N: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """N entries of the row after the accepted prefix: who wins the residual, or the target if none was refused."""
    program = tl.program_id(0).to(tl.int64)
    request, split = program // splits, program % splits
    temperature, _, given, good = request_of(request, rows, temperature_ptr, top_p_ptr, budget_ptr, count_ptr)
    seed, position = tl.load(seed_ptr + request).to(tl.int64), tl.load(position_ptr + request).to(tl.int64)
    if given & good & (temperature > 0):
        usable = tl.load(of_request(memory_ptr, batch, USABLE, request))
        flags = tl.load(of_request(memory_ptr, batch, FLAGS, request))
        if BLOCK:
            kept, scale = _longest(memory_ptr, batch, rows, splits, request, usable, seed, position, W)
            refused = (kept < usable).to(tl.int64)
            # what is wrong with the row that ends the draft counts where the prefix reaches it
            decided = (refused != 0) | ((flags & _UNDECIDED) == 0)
            if split == 0:
                tl.store(of_request(memory_ptr, batch, KEPT, request), kept)
        else:
            kept, scale = usable, load_wide(of_request(memory_ptr, batch, SCALE, request))
            refused = tl.load(of_request(memory_ptr, batch, REFUSED, request))
            decided = (flags & _UNDECIDED) == 0
        score = tl.full([], -float("inf"), tl.float64)
        winner = tl.full([], -1, tl.int64)
        score_all = tl.full([], -float("inf"), tl.float64)
        winner_all = tl.full([], -1, tl.int64)
        if decided:
            row = request * rows + kept
            start = split * N
            index = start + tl.arange(0, N)
            top = load_wide(of_row(memory_ptr, batch, rows, TOP, row))
            total = load_wide(of_row(memory_ptr, batch, rows, TOTAL, row))
            row_ptr = logits_ptr + request * logits_stride + kept * logits_row_stride
            mass = masses(row_ptr, index, vocab, top, temperature, cut_key_ptr, cut_id_ptr, row, DROP, FP64)
            p = mass / total
            noise = gumbel(words_from(start, tl.full([], _RESIDUAL, tl.uint32), seed, position, N))
            if refused != 0:
                draft = load_wide(of_row(memory_ptr, batch, rows, DRAFT, row))
                drawn = tl.load(candidates_ptr + request * candidates_stride + kept + 1).to(tl.int64)
                q_ptr = None if probs_ptr is None else probs_ptr + request * probs_stride + kept * probs_row_stride
                list_ptr = None if ids_ptr is None else ids_ptr + request * ids_stride + kept * ids_row_stride
                q = draft_of(index, start, draft, drawn, q_ptr, list_ptr, vocab, listed, N, L)
                scores = tl.log(tl.maximum(scale * p - q, 0.0)) + noise
                score, winner = tl.max(scores, axis=0), lowest_best(scores, index)
            if winner < 0:
                scores = tl.log(p) + noise
                score_all, winner_all = tl.max(scores, axis=0), lowest_best(scores, index)
        store_wide(of_race(memory_ptr, batch, rows, splits, SCORE, program), score)
        tl.store(of_race(memory_ptr, batch, rows, splits, WINNER, program), winner)
        store_wide(of_race(memory_ptr, batch, rows, splits, SCORE_ALL, program), score_all)
        tl.store(of_race(memory_ptr, batch, rows, splits, WINNER_ALL, program), winner_all)


@triton.jit
def _best_of(memory_ptr, batch, rows, splits, score, winner, at, used):
    scores = tl.load(of_race(memory_ptr, batch, rows, splits, score, at), mask=used, other=0)
    winners = tl.load(of_race(memory_ptr, batch, rows, splits, winner, at), mask=used, other=-1)
    scores = tl.where(winners >= 0, scores.to(tl.float64, bitcast=True), -float("inf"))
    return lowest_best(scores, winners)


@triton.jit(do_not_specialize=["batch", "rows", "splits", "num_stop"])
def accept_finish_kernel(
    candidates_ptr, candidates_stride, temperature_ptr, top_p_ptr, budget_ptr, count_ptr,
    stop_ptr, stop_stride, num_stop,
    memory_ptr, batch, rows, splits,
    accept_ptr, commit_ptr, bonus_ptr, out_ptr, finished_ptr, status_ptr,  # out
    accept_stride, commit_stride, bonus_stride, out_stride, out_column_stride, finished_stride, status_stride,
    BLOCK: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One request: the winner of the race, and the cut at stop tokens and the budget."""
    request = tl.program_id(0).to(tl.int64)
    temperature, _, given, good = request_of(request, rows, temperature_ptr, top_p_ptr, budget_ptr, count_ptr)
    live = given & good
    kept = tl.load(of_request(memory_ptr, batch, KEPT, request))
    flags = tl.load(of_request(memory_ptr, batch, FLAGS, request))
    token = tl.load(of_request(memory_ptr, batch, TOKEN, request))
    if live & (temperature > 0):
        lane = tl.arange(0, W)
        at, used = request * splits + lane, lane < splits
        token = _best_of(memory_ptr, batch, rows, splits, SCORE, WINNER, at, used)
        if token < 0:
            token = _best_of(memory_ptr, batch, rows, splits, SCORE_ALL, WINNER_ALL, at, used)
        if BLOCK:
            flags = tl.where(kept < tl.load(of_request(memory_ptr, batch, USABLE, request)), 0, flags)
    tl.store(status_ptr + request * status_stride, flags.to(tl.int32))
    column = tl.arange(0, C)[None, :]
    one = request + tl.arange(0, 1)
    drawn = tl.load(
        candidates_ptr + request * candidates_stride + column + 1, mask=(column < rows - 1) & (column < kept), other=-1
    ).to(tl.int64)
    target = tl.where(column < kept, drawn, tl.where(column == kept, token, -1))
    always = one >= 0
    emit(
        target, kept + tl.zeros([1], tl.int64), always & live, always, one, stop_ptr, stop_stride, num_stop, budget_ptr,
        accept_ptr, commit_ptr, bonus_ptr, out_ptr, finished_ptr,
        accept_stride, commit_stride, bonus_stride, out_stride, out_column_stride, finished_stride, rows, C,
    )  # fmt: skip
