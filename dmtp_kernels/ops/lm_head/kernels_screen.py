"""Triton kernels of the head: the screening pass. It streams the cheap copy once and never writes logits.

Integer formats multiply int8 codes by the three int8 digits of the states with int8 matrix instructions. Packed codes
are unpacked by bit operations alone; their offset is taken out by what the sums start from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.lm_head.kernels import ABSENT, ordered, token_ids
from dmtp_kernels.ops.lm_head.reference import _HUGE

_RADIUS_LIMIT = tl.constexpr(_HUGE)
# the interpreter has no inline assembly
_PACKED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Bytes shifted right, left for negative BITS. Four are shifted as one word: mask off what crosses bytes."""
    if _PACKED:
        if BITS == 4:
            x = tl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
        elif BITS == 2:
            x = tl.inline_asm_elementwise("shr.b32 $0, $1, 2;", "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
        elif BITS == -2:
            x = tl.inline_asm_elementwise("shl.b32 $0, $1, 2;", "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
        elif BITS == -4:
            x = tl.inline_asm_elementwise("shl.b32 $0, $1, 4;", "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    elif BITS > 0:
        x = x >> BITS
    elif BITS < 0:
        x = x << -BITS
    return x


@triton.jit
def _digit_dots(w, digits, padded, live, acc0, acc1, acc2):
    """Codes `[V, K]` times each of the three digit planes at `digits [K, N]`."""
    acc0 = tl.dot(w, tl.load(digits, mask=live, other=0), acc0, out_dtype=tl.int32)
    acc1 = tl.dot(w, tl.load(digits + padded, mask=live, other=0), acc1, out_dtype=tl.int32)
    acc2 = tl.dot(w, tl.load(digits + 2 * padded, mask=live, other=0), acc2, out_dtype=tl.int32)
    return acc0, acc1, acc2


@triton.jit
def _starts(sums, plane, live, zero):
    """What the dots of one group start from: the offset of its codes times the digits' sums, or zero."""
    if sums is None:
        return zero, zero, zero
    first = tl.load(sums, mask=live, other=0)[None, :] + zero
    second = tl.load(sums + plane, mask=live, other=0)[None, :] + zero
    third = tl.load(sums + 2 * plane, mask=live, other=0)[None, :] + zero
    return first, second, third


@triton.jit
def _exact(acc0, acc1, acc2, step, scale):
    """fp32 scores of exact sums: rounded by the scale in double, and to fp32."""
    total = acc2.to(tl.int64) * 65536 + (acc1.to(tl.int64) * 256 + acc0)
    return (total.to(tl.float64) * step.to(tl.float64)[None, :] * scale.to(tl.float64)[:, None]).to(tl.float32)


@triton.jit
def _add_group(score, acc0, acc1, acc2, scale, step):
    """`score` plus one group's dots times its scale, in fp32; a power of two first, or large scales overflow."""
    dots = tl.fma(acc2.to(tl.float32), 65536.0, (acc1 * 256 + acc0).to(tl.float32)) * step[None, :]
    return tl.fma(dots, scale[:, None], score)


@triton.jit
def _dense_scores(
    rows, real, states, live, size, V: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr
):
    column = tl.arange(0, K)
    score = tl.zeros((V, N), tl.float32)
    for start in tl.range(0, size, K, num_stages=STAGES):
        k = start + column
        inside = k < size
        w = tl.load(rows[:, None] + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        h = tl.load(states[None, :] + k[:, None], mask=live[None, :] & inside[:, None], other=0.0)
        if w.dtype != h.dtype:
            w, h = w.to(tl.float32), h.to(tl.float32)
        score = tl.dot(w, h, score, input_precision="ieee")
    return score


@triton.jit
def _int8_scores(
    rows, real, digits, live, step, scale, row, size, padded,
    V: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, K)
    acc0 = tl.zeros((V, N), tl.int32)
    acc1 = acc0
    acc2 = acc0
    for start in tl.range(0, size, K, num_stages=STAGES):
        k = start + column
        w = tl.load(rows[:, None] + k[None, :], mask=real[:, None] & (k < size)[None, :], other=0)
        acc0, acc1, acc2 = _digit_dots(w, digits[None, :] + k[:, None], padded, live[None, :], acc0, acc1, acc2)
    return _exact(acc0, acc1, acc2, step, tl.load(scale + row, mask=real, other=0.0))


@triton.jit
def _int8_g64_scores(
    rows, real, digits, live, step, scales, size, padded,
    V: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, 64)
    zero = tl.zeros((V, N), tl.int32)
    score = tl.zeros((V, N), tl.float32)
    for start in tl.range(0, size, 128, num_stages=STAGES):
        for i in tl.static_range(2):
            k = start + 64 * i + column
            w = tl.load(rows[:, None] + k[None, :], mask=real[:, None] & (k < size)[None, :], other=0)
            scale = tl.load(scales + (start // 64 + i), mask=real & (start + 64 * i < size), other=0.0)
            dots = _digit_dots(w, digits[None, :] + k[:, None], padded, live[None, :], zero, zero, zero)
            score = _add_group(score, dots[0], dots[1], dots[2], scale, step)
    return score


@triton.jit
def _int6_g64_scores(
    rows, real, digits, sums, live, step, scales, size, padded,
    V: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, 32)
    zero = tl.zeros((V, N), tl.int32)
    score = tl.zeros((V, N), tl.float32)
    for block in tl.range(0, padded // 128, num_stages=STAGES):
        high = tl.load(rows[:, None] + (padded // 128 * 64 + block * 32 + column)[None, :], mask=real[:, None], other=0)
        for i in tl.static_range(2):
            low = tl.load(rows[:, None] + (block * 64 + i * 32 + column)[None, :], mask=real[:, None], other=0)
            group = block * 2 + i
            scale = tl.load(scales + group, mask=real & (group * 64 < size), other=0.0)
            dots = _starts(sums + group, padded // 64, live, zero)
            at = digits[None, :] + (group * 64 + column)[:, None]
            w = (low & 15) | (_shift(high, 4 * i - 4) & 48)
            dots = _digit_dots(w.to(tl.int8, bitcast=True), at, padded, live[None, :], dots[0], dots[1], dots[2])
            w = (_shift(low, 4) & 15) | (_shift(high, 4 * i - 2) & 48)
            dots = _digit_dots(w.to(tl.int8, bitcast=True), at + 32, padded, live[None, :], dots[0], dots[1], dots[2])
            score = _add_group(score, dots[0], dots[1], dots[2], scale, step)
    return score


@triton.jit
def _int4_g32_scores(
    rows, real, digits, sums, live, step, scale, row, size, padded,
    V: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, 32)
    blocks = (size + 63) // 64
    # multipliers of four groups at a time
    multipliers = (rows + blocks * 32).to(tl.pointer_type(tl.int32), bitcast=True)
    zero = tl.zeros((V, N), tl.int32)
    acc0 = zero
    acc1 = zero
    acc2 = zero
    for pair in tl.range(0, (blocks + 1) // 2, num_stages=STAGES):
        word = tl.load(multipliers + pair, mask=real, other=0)
        for i in tl.static_range(2):
            block = pair * 2 + i
            inside = real & (block < blocks)
            w = tl.load(rows[:, None] + (block * 32 + column)[None, :], mask=inside[:, None], other=0)
            for half in tl.static_range(2):
                group = block * 2 + half
                dots = _starts(sums + group, padded // 32, live, zero)
                code = (_shift(w, 4 * half) & 15).to(tl.int8, bitcast=True)
                at = digits[None, :] + (group * 32 + column)[:, None]
                dots = _digit_dots(code, at, padded, live[None, :], dots[0], dots[1], dots[2])
                multiplier = ((word >> (16 * i + 8 * half)) & 127)[:, None]
                acc0 += multiplier * dots[0]
                acc1 += multiplier * dots[1]
                acc2 += multiplier * dots[2]
    return _exact(acc0, acc1, acc2, step, tl.load(scale + row, mask=real, other=0.0))


@triton.jit
def _reduced(value, V: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """Greatest value of each GROUP rows `[V // GROUP, N]`."""
    if GROUP == 1:
        return value
    return tl.max(tl.reshape(value, (V // GROUP, GROUP, N)), axis=1)


@triton.jit
def _report(
    score, row, named, state, live, bound, length, best, upper, lower, groups, group_stride, first_group,
    V: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, CERTIFIED: tl.constexpr,
):  # fmt: skip
    """Group values of a tile of scores `[V, N]`, and the best lower end of each state."""
    group = first_group + tl.arange(0, V // GROUP)
    offset = state.to(tl.int64)[None, :] * group_stride + group[:, None]
    inside = live[None, :] & (group < groups)[:, None]
    if CERTIFIED:
        # a padding row's bound is never read: its score is zero and it takes no part
        reach = (
            tl.load(bound + row, mask=named, other=0.0)[:, None]
            * tl.load(length + state, mask=live, other=0.0)[None, :]
        )
        # below this radius no order of summation can overflow fp32
        reach = tl.where(reach < _RADIUS_LIMIT, reach, float("inf"))
        low = score - reach
        low = tl.where(low < float("inf"), low, float("-inf"))
        low = tl.where(named[:, None], ordered(low), ABSENT)
        if best is not None:
            tl.atomic_max(best + state, tl.max(low, axis=0), mask=live, sem="relaxed")
        if lower is not None:
            tl.store(lower + offset, _reduced(low, V, N, GROUP), mask=inside)
        score = score + reach
        value = tl.where(score == score, ordered(score), 0x7FFFFFFF)
    else:
        value = ordered(tl.where(score == score, score, float("-inf")))
    value = tl.where(named[:, None], value, ABSENT)
    tl.store(upper + offset, _reduced(value, V, N, GROUP), mask=inside)


@triton.jit(do_not_specialize=["n", "num_valid", "id_offset", "groups"])
def lm_head_screen_kernel(
    rows,  # [V, H] weight rows (dense), else codes
    scale,  # [V] or [V, groups of columns]
    bound,  # [V]
    id_map,  # [V]
    states,  # [n, H] hidden (dense), else digits [n, 3, padded]
    sums,  # [n, 3, column groups]
    step,  # [n]
    length,  # [n]
    best,  # [n] int32 out, or None
    upper,  # [n, group_stride] int32 out
    lower,  # [n, group_stride] int32 out, or None
    n,
    num_valid,
    id_offset,
    size,
    padded,
    groups,
    group_stride,
    stride_row,
    stride_scale,
    stride_state,
    stride_sums,
    FORMAT: tl.constexpr,
    CERTIFIED: tl.constexpr,
    MAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of a tile of rows for a tile of states, kept in registers; see `_report` for what is written."""
    # programs that share rows are neighbours, so the rows come from memory once
    state = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    row = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    live, real = state < n, row < num_valid
    wide_row, wide_state = row.to(tl.int64), state.to(tl.int64)
    row_at, state_at = rows + wide_row * stride_row, states + wide_state * stride_state
    sums_at = sums
    unit = live
    if sums is not None:
        sums_at = sums + wide_state * stride_sums
    if step is not None:
        unit = tl.load(step + state, mask=live, other=0.0)
    if FORMAT == "dense":
        score = _dense_scores(row_at, real, state_at, live, size, BLOCK_V, BLOCK_N, BLOCK_K, STAGES)
    elif FORMAT == "int8":
        score = _int8_scores(
            row_at, real, state_at, live, unit, scale, row, size, padded, BLOCK_V, BLOCK_N, BLOCK_K, STAGES
        )
    elif FORMAT == "int8_g64":
        scale_at = scale + wide_row * stride_scale
        score = _int8_g64_scores(row_at, real, state_at, live, unit, scale_at, size, padded, BLOCK_V, BLOCK_N, STAGES)
    elif FORMAT == "int6_g64":
        scale_at = scale + wide_row * stride_scale
        score = _int6_g64_scores(
            row_at, real, state_at, sums_at, live, unit, scale_at, size, padded, BLOCK_V, BLOCK_N, STAGES
        )
    else:
        score = _int4_g32_scores(
            row_at, real, state_at, sums_at, live, unit, scale, row, size, padded, BLOCK_V, BLOCK_N, STAGES
        )
    named = real if MAP == 0 else token_ids(row, real, id_map, id_offset, MAP) >= 0
    _report(
        score, row, named, state, live, bound, length, best, upper, lower, groups, group_stride,
        tile * (BLOCK_V // GROUP), BLOCK_V, BLOCK_N, GROUP, CERTIFIED,
    )  # fmt: skip
