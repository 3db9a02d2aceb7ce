"""Triton kernel that finds what top-k and top-p keep of a row: the last kept entry of its ranking."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.sample.kernels_draw import key_of, log_weight, logits_at

_ALL = tl.constexpr(2**62)
_DIGIT = tl.constexpr(4)
_BINS = tl.constexpr(16)


@triton.jit
def _amounts(
    row_ptr, index, num_valid, top, temperature, unit, cut_key, cut_id,
    BY_MASS: tl.constexpr, DROP: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    """Keys of a tile and what each entry adds to the prefix: 1, or its mass where the cut keeps it."""
    x, _ = logits_at(row_ptr, index, num_valid, FP64)
    key = key_of(x, DROP).to(tl.uint64)
    if BY_MASS:
        mass = (tl.exp(log_weight(x.to(tl.float64), top, temperature)) * unit + 0.5).to(tl.int64)
        kept = (key > cut_key) | ((key == cut_key) & (index <= cut_id))
        return key, tl.where(kept & (index < num_valid), mass, 0)
    else:
        return key, tl.where(index < num_valid, 1, 0).to(tl.int64)


@triton.jit
def _least_prefix(
    row_ptr, num_valid, top, temperature, unit, cut_key, cut_id, share, target,
    BY_MASS: tl.constexpr, DROP: tl.constexpr, FP64: tl.constexpr, DIGITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(key, id) of the last entry of the least prefix that reaches `target`, or `share` of all: digit by digit."""
    bin_of = tl.arange(0, _BINS)
    prefix = tl.full([], 0, tl.uint64)
    for step in range(DIGITS):
        shift = ((DIGITS - 1 - step) * _DIGIT).to(tl.uint64)
        sums = tl.zeros([_BINS, N], tl.int64)
        for start in range(0, num_valid, N):
            index = start + tl.arange(0, N)
            key, amount = _amounts(
                row_ptr, index, num_valid, top, temperature, unit, cut_key, cut_id, BY_MASS, DROP, FP64
            )
            # the digits above are those of the prefix; a shift by 64 bits is not one
            digits = key >> shift
            digit = (digits & 15).to(tl.int32)
            inside = (digits >> _DIGIT) == prefix
            sums += tl.where((digit[None, :] == bin_of[:, None]) & inside[None, :], amount[None, :], 0)
        bins = tl.sum(sums, axis=1)
        if BY_MASS:  # noqa: SIM102, only the outer one is known when the kernel is compiled
            if step == 0:
                total = tl.sum(bins, axis=0)
                wanted = tl.ceil(share * total.to(tl.float64)).to(tl.int64)
                target = tl.minimum(tl.maximum(wanted, 1), total)
        # what lies in a bin and those above it
        reach = tl.sum(tl.where(bin_of[None, :] >= bin_of[:, None], bins[None, :], 0), axis=1)
        chosen = tl.max(tl.where(reach >= target, bin_of, 0), axis=0)
        target -= tl.sum(tl.where(bin_of > chosen, bins, 0), axis=0)
        prefix = prefix * 16 + chosen.to(tl.uint64)
    # equal entries by id
    seen = tl.full([], 0, tl.int64)
    last = tl.full([], -1, tl.int64)
    for start in range(0, num_valid, N):
        index = start + tl.arange(0, N)
        key, amount = _amounts(row_ptr, index, num_valid, top, temperature, unit, cut_key, cut_id, BY_MASS, DROP, FP64)
        amount = tl.where(key == prefix, amount, 0)
        before = seen + tl.cumsum(amount, axis=0) - amount
        kept = (amount > 0) & (before < target)
        last = tl.maximum(last, tl.max(tl.where(kept, index, -1), axis=0).to(tl.int64))
        seen += tl.sum(amount, axis=0)
    return prefix, last


@triton.jit(do_not_specialize=["rows_of_request", "unit"])
def sample_cut_kernel(
    logits_ptr, outer_stride, row_stride,  # [n, V]; rows `rows_of_request` apart start a new outer row
    temperature_ptr, top_k_ptr, top_p_ptr,  # one per outer row; top_k_ptr or top_p_ptr may be None
    num_valid, rows_of_request, unit,
    key_ptr, id_ptr,  # [n] uint64, int64 out: entries of a greater key, and of this key up to this id, are kept
    DROP: tl.constexpr, FP64: tl.constexpr, DIGITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row's cut; rows that no filter touches, or that are not sampled, keep all."""
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_of_request
    row_ptr = logits_ptr + request * outer_stride + row % rows_of_request * row_stride
    temperature = tl.load(temperature_ptr + request).to(tl.float64)
    key = tl.full([], 0, tl.uint64)
    last = tl.full([], 0, tl.int64) + _ALL
    count = tl.full([], 0, tl.int64)
    share = tl.full([], 1.0, tl.float64)
    units = tl.cast(unit, tl.float64)
    if top_k_ptr is not None:
        count = tl.load(top_k_ptr + request).to(tl.int64)
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + request).to(tl.float64)
    by_count = (count > 0) & (count < num_valid)
    sampled = (temperature > 0) & (temperature < float("inf"))
    if sampled & (by_count | (share < 1)):
        highest = tl.full([N], -float("inf"), tl.float64 if FP64 else tl.float32)
        for start in range(0, num_valid, N):
            x, _ = logits_at(row_ptr, start + tl.arange(0, N), num_valid, FP64)
            highest = tl.maximum(highest, x)
        top = tl.max(highest, axis=0).to(tl.float64)
        # rows without a finite top are decided without a draw
        if (top > -float("inf")) & (top < float("inf")):
            if by_count:
                key, last = _least_prefix(
                    row_ptr, num_valid, top, temperature, units, key, last, share, count, False, DROP, FP64, DIGITS, N
                )
            if share < 1:
                share = tl.maximum(share, 0.0)
                key, last = _least_prefix(
                    row_ptr, num_valid, top, temperature, units, key, last, share, count, True, DROP, FP64, DIGITS, N
                )
    tl.store(key_ptr + row, key)
    tl.store(id_ptr + row, last)
