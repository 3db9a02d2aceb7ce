"""What becomes of a row that is not copied bit for bit: device functions of kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotary_partner(d, ROTARY: tl.constexpr):  # [DP]
    """The element that each one is rotated with."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))


@triton.jit
def _fp8(x, FRACTION: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, UNIT: tl.constexpr):
    """Codes of x: saturated, then rounded to nearest even; NaN is 0x7F. UNIT: the float whose last place is the
    smallest number of the format."""
    DROP: tl.constexpr = 23 - FRACTION
    nan = x != x
    bits = tl.minimum(tl.maximum(x, -MOST), MOST).to(tl.float32).to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    sum = magnitude.to(tl.float32, bitcast=True) + UNIT
    small = sum.to(tl.uint32, bitcast=True) - ((128 - BIAS + DROP) << 23)
    half = ((1 << (DROP - 1)) - 1) + ((magnitude >> DROP) & 1)
    large = (magnitude + half - ((127 - BIAS) << 23)) >> DROP
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, large)
    return tl.where(nan, 0x7F, sign | code).to(tl.uint8)


@triton.jit
def made(
    x, y, d, norm_ptr, position, cos_sin_ptr, cos_sin_row, scale, kind: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """x[ROWS, GROUP, DP] normed, rotated with its partners y, divided by scale[GROUP] and rounded once.

    FP8: fraction bits of the cache's format, 0 where it is none of fp8.
    """
    WIDE: tl.constexpr = tl.float64 if x.dtype == tl.float64 or kind == tl.float64 else tl.float32
    x = x.to(WIDE)
    y = y.to(WIDE)
    HALF: tl.constexpr = ROTARY // 2
    if norm_ptr is not None:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=2) / D + EPS)
        weight = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(WIDE) + OFFSET
        x = x * factor[:, :, None] * weight[None, None, :]
        if ROTARY > 0:
            weight = tl.load(norm_ptr + rotary_partner(d, ROTARY), mask=d < D, other=0.0).to(WIDE) + OFFSET
            y = y * factor[:, :, None] * weight[None, None, :]
    if ROTARY > 0:
        angle = cos_sin_ptr + (position * cos_sin_row)[:, None] + (d % HALF)[None, :]
        turned = (d < ROTARY)[None, :]
        cos = tl.load(angle, mask=turned, other=1.0).to(WIDE)
        sin = tl.load(angle + HALF, mask=turned, other=0.0).to(WIDE)
        x = x * cos[:, None, :] + tl.where((d < HALF)[None, None, :], -y, y) * sin[:, None, :]
        x = tl.where((d < ROTARY)[None, None, :], x, y)
    if scale is not None:
        divisor = tl.broadcast_to(scale.to(WIDE)[None, :, None], x.shape)
        x = x / divisor if x.dtype == tl.float64 else tl.div_rn(x, divisor)
    if FP8 == 3:
        return _fp8(x, 3, 7, 448.0, 16384.0)
    if FP8 == 2:
        return _fp8(x, 2, 15, 57344.0, 128.0)
    if kind != tl.float64:
        # double goes through float, as torch's conversions do
        x = x.to(tl.float32)
    return x.to(kind)
