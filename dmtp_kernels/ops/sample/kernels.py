"""Triton kernels of sampling: the race of each part of a row, and the decision between the parts' winners."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.sample.kernels_draw import (
    FAR,
    gumbel,
    key_of,
    log_weight,
    logits_at,
    lowest_best,
    word_at,
    words_from,
)

_NAN_IGNORED, _NOTHING, _BAD = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _bad(temperature, top_p_ptr, row):
    bad = (temperature >= 0) == 0
    bad = bad | (temperature == float("inf"))
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
        bad = bad | ((top_p != top_p) & (temperature != 0))
    return bad


@triton.jit
def _write(row, token, any_nan, top, bad, token_ptr, token_stride, status_ptr, status_stride):
    empty = top == -float("inf")
    token = tl.where(empty | bad, -1, token)
    status = tl.where(any_nan, _NAN_IGNORED, 0) + tl.where(empty, _NOTHING, 0) + tl.where(bad, _BAD, 0)
    tl.store(token_ptr + row * token_stride, token.to(tl.int64))
    tl.store(status_ptr + row * status_stride, status.to(tl.int32))


@triton.jit(do_not_specialize=["stream", "splits"])
def sample_race_kernel(
    logits_ptr, row_stride, temperature_ptr, top_p_ptr, seed_ptr, position_ptr,  # [n, V], [n] x4, top_p may be None
    cut_key_ptr, cut_id_ptr,  # [n] x2, or None
    num_valid, stream, splits,
    top_ptr, first_ptr, winner_ptr, nan_ptr,  # [n, splits] fp64, i64, i64, i32 out
    token_ptr, token_stride, status_ptr, status_stride,  # [n] x2 out, where one program is the row
    DROP: tl.constexpr, FP64: tl.constexpr, SINGLE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N entries of a row: the largest, its lowest id, the winner of the race among those kept, whether one is NaN."""
    program = tl.program_id(0).to(tl.int64)
    row, split = program // splits, program % splits
    start = split * N
    index = start + tl.arange(0, N)
    x, nan = logits_at(logits_ptr + row * row_stride, index, num_valid, FP64)
    any_nan = tl.max(nan.to(tl.int32), axis=0)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    top = tl.max(x, axis=0)
    first = tl.min(tl.where(x == top, index, FAR), axis=0)
    winner = first
    if (temperature > 0) & (top > -float("inf")) & (top < float("inf")):
        kept = index < num_valid
        if cut_key_ptr is not None:
            key, cut = key_of(x, DROP).to(tl.uint64), tl.load(cut_key_ptr + row)
            kept = kept & ((key > cut) | ((key == cut) & (index <= tl.load(cut_id_ptr + row))))
        seed, position = tl.load(seed_ptr + row).to(tl.int64), tl.load(position_ptr + row).to(tl.int64)
        word = words_from(start, tl.cast(stream, tl.uint32), seed, position, N)
        score = log_weight(x.to(tl.float64), top.to(tl.float64), temperature) + gumbel(word)
        winner = lowest_best(tl.where(kept, score, -float("inf")), index)
    if SINGLE:
        bad = _bad(temperature, top_p_ptr, row)
        _write(row, winner, any_nan > 0, top, bad, token_ptr, token_stride, status_ptr, status_stride)
    else:
        tl.store(top_ptr + program, top.to(tl.float64))
        tl.store(first_ptr + program, first)
        tl.store(winner_ptr + program, winner)
        tl.store(nan_ptr + program, any_nan)


@triton.jit(do_not_specialize=["stream", "splits"])
def sample_finish_kernel(
    logits_ptr, row_stride, temperature_ptr, top_p_ptr, seed_ptr, position_ptr,  # as above
    stream, splits,
    top_ptr, first_ptr, winner_ptr, nan_ptr,  # [n, splits]
    token_ptr, token_stride, status_ptr, status_stride,  # [n] x2 out
    W: tl.constexpr,
):  # fmt: skip
    """One row: the best of its parts' winners, scored against the row's own maximum."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, W)
    used, at = part < splits, row * splits + part
    tops = tl.load(top_ptr + at, mask=used, other=-float("inf"))
    firsts = tl.load(first_ptr + at, mask=used, other=FAR)
    winner = tl.load(winner_ptr + at, mask=used, other=-1)
    any_nan = tl.max(tl.load(nan_ptr + at, mask=used, other=0), axis=0)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    top = tl.max(tops, axis=0)
    token = tl.min(tl.where(tops == top, firsts, FAR), axis=0)
    if (temperature > 0) & (top > -float("inf")) & (top < float("inf")):
        raced = used & (winner >= 0) & (tops > -float("inf"))
        safe = tl.where(raced, winner, 0)
        x = tl.load(logits_ptr + row * row_stride + safe, mask=raced, other=-float("inf")).to(tl.float64)
        seed, position = tl.load(seed_ptr + row).to(tl.int64), tl.load(position_ptr + row).to(tl.int64)
        word = word_at(safe, tl.cast(stream, tl.uint32), seed, position)
        score = log_weight(x, top, temperature) + gumbel(word)
        token = lowest_best(tl.where(raced, score, -float("inf")), winner)
    bad = _bad(temperature, top_p_ptr, row)
    _write(row, token, any_nan > 0, top, bad, token_ptr, token_stride, status_ptr, status_stride)
