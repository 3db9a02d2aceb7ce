"""Triton kernels of the head: what all steps share, the step before the screen, and float factors."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from dmtp_kernels.ops.lm_head import keys
from dmtp_kernels.ops.lm_head.digits import HIGH, LOW
from dmtp_kernels.ops.lm_head.reference import NO_TOKEN

NO_KEY = tl.constexpr(keys.NO_KEY)
# value of a group or row that takes no part; every float, -inf too, is ordered above it
ABSENT = tl.constexpr(-(1 << 31))
LANES = tl.constexpr(256)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LOW = tl.constexpr(LOW)
_HIGH = tl.constexpr(HIGH)
_LENGTH_SLACK = tl.constexpr(1 + 2.0**-20)


@triton.jit
def ordered(x):
    """int32 that orders like the float; -0.0 like 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(bits):
    """The float of an `ordered` value; the greatest int32 gives NaN."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def token_ids(rows, real, id_map, id_offset, MAP: tl.constexpr):
    """Token of each row as int64, -1 where the row is not real. MAP: 0 none, 1 offset, 2 absolute."""
    token = rows.to(tl.int64) + id_offset
    if MAP != 0:
        mapped = tl.load(id_map + rows.to(tl.int64), mask=real, other=-1).to(tl.int64)
        token = token + mapped if MAP == 1 else mapped
    return tl.where(real, token, -1)


@triton.jit
def encode(logit, token, BF16: tl.constexpr):
    """Keys of logits; NaN and negative tokens give `NO_KEY`."""
    if BF16:
        logit = logit.to(tl.bfloat16).to(tl.float32)
    key = (ordered(logit).to(tl.int64) << 32) | (~token & 0xFFFFFFFF)
    return tl.where((logit != logit) | (token < 0), NO_KEY, key)


@triton.jit
def canonical_dots(
    hidden,  # pointer to one state [H]
    rows,  # [R] pointers to weight rows
    live,  # [R]
    size,
    R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Canonical dots `[R]` fp32: 256 lanes filled in ascending order, then adjacent pairs. No fused multiply-add."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((R, LANES), tl.float32)
    for start in tl.range(0, size, LANES, num_stages=STAGES):
        column = start + lane
        inside = column < size
        h = tl.load(hidden + column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(rows[:, None] + column[None, :], mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += h[None, :] * w
    for level in tl.static_range(1, 9):
        left, right = tl.split(tl.reshape(total, (R, LANES >> level, 2)))
        total = left + right
    return tl.reshape(total, (R,))


@triton.jit(do_not_specialize=["rank"])
def lm_head_project_kernel(
    hidden,  # [n, H]
    down,  # [r, H]
    state,  # [n, r] fp32 out
    rank,
    size,
    stride_hidden,
    stride_down,
    R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Canonical products of each state with the rows of `down`."""
    n = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    live = rows < rank
    pointers = down + rows.to(tl.int64) * stride_down
    dots = canonical_dots(hidden + n * stride_hidden, pointers, live, size, R, STAGES)
    tl.store(state + n * rank + rows, dots, mask=live)


@triton.jit(do_not_specialize=["n", "num_valid", "id_offset", "groups"])
def lm_head_factor_kernel(
    rows,  # [V, r] factors
    id_map,  # [V]
    states,  # [n, r] fp32
    upper,  # [n, group_stride] int32 out
    n,
    num_valid,
    id_offset,
    size,
    groups,
    group_stride,
    stride_row,
    MAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Canonical scores of a tile of factor rows for one state after another: the rows stay in the cache."""
    tile = tl.program_id(0)
    row = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real = row < num_valid
    named = real if MAP == 0 else token_ids(row, real, id_map, id_offset, MAP) >= 0
    row_at = rows + row.to(tl.int64) * stride_row
    group = tile * (BLOCK_V // GROUP) + tl.arange(0, BLOCK_V // GROUP)
    for state in range(n):
        wide = tl.cast(state, tl.int64)
        score = canonical_dots(states + wide * size, row_at, named, size, BLOCK_V, STAGES)
        value = ordered(tl.where(score == score, score, float("-inf")))
        value = tl.max(tl.reshape(tl.where(named, value, ABSENT), (BLOCK_V // GROUP, GROUP)), axis=1)
        tl.store(upper + wide * group_stride + group, value, mask=group < groups)


@triton.jit(do_not_specialize=["flags"])
def lm_head_prepare_kernel(
    hidden,  # [n, H]
    digits,  # [n, 3, padded] int8 out
    sums,  # [n, 3, padded // SUMS] int32 out
    step,  # [n] fp32 out: the unit of the fixed-point row, NaN where it cannot be screened
    length,  # [n] fp32 out: no less than the row's 2-norm
    best,  # [n] int32 out
    key,  # [n] int64 out
    status,  # [n] int32 out
    size,
    padded,
    stride_hidden,
    stride_key,
    stride_status,
    flags,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
    SUMS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One program per state: fixed point, norm, and the values that later steps raise."""
    n = tl.program_id(0).to(tl.int64)
    if key is not None:
        tl.store(key + n * stride_key, NO_KEY)
        tl.store(status + n * stride_status, flags | _NO_TOKEN)
    if best is not None:
        tl.store(best + n, ABSENT)
    if DIGITS or length is not None:
        column = tl.arange(0, BLOCK)
        h = tl.load(hidden + n * stride_hidden + column, mask=column < size, other=0.0).to(tl.float32)
    if length is not None:
        wide = h.to(tl.float64)
        tl.store(length + n, tl.sqrt(tl.sum(wide * wide, axis=0)).to(tl.float32) * _LENGTH_SLACK)
    if DIGITS:
        # as integers NaN is above inf
        top = tl.max(h.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        greatest = top.to(tl.float32, bitcast=True)
        usable = (greatest >= _LOW) & (greatest <= _HIGH)
        exponent = tl.where(usable, (top >> 23) - 127, 0) - 21
        up = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        q = libdevice.rint(tl.where(usable, h, 0.0) * up).to(tl.int32)
        tl.store(step + n, tl.where(usable | (top == 0), unit, float("nan")))
        for i in tl.static_range(3):
            digit = ((q + 128) & 255) - 128
            q = (q - digit) >> 8
            tl.store(digits + (n * 3 + i) * padded + column, digit.to(tl.int8), mask=column < padded)
            if sums is not None:
                group = tl.arange(0, BLOCK // SUMS)
                total = tl.sum(tl.reshape(digit, (BLOCK // SUMS, SUMS)), axis=1) * FACTOR
                tl.store(sums + (n * 3 + i) * (padded // SUMS) + group, total, mask=group < padded // SUMS)
