"""What the Triton kernels of everything that samples share: the draws, the order of logits, the weights."""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**62)
"""No id; larger than any."""
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def philox(counter, stream, seed, position):
    """Four words uint32 of each counter; `stream` uint32, seed and position int64."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = c0 * 0 + stream
    c2, c3 = c0 * 0 + position.to(tl.uint32), c0 * 0 + (position >> 32).to(tl.uint32)
    m0, m1 = tl.full(c0.shape, 0xD2511F53, tl.uint32), tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full(c0.shape, 0x9E3779B9, tl.uint32), tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    k0, k1 = c0 * 0 + k0, c0 * 0 + k1
    for _ in tl.static_range(10):
        a, b = c0, c2
        c0, c2 = tl.umulhi(b, m1) ^ c1 ^ k0, tl.umulhi(a, m0) ^ c3 ^ k1
        c1, c3 = b * m1, a * m0
        k0, k1 = k0 + w0, k1 + w1
    return c0, c1, c2, c3


@triton.jit
def words_from(first, stream, seed, position, N: tl.constexpr):
    """Words [N] of draws first .. first + N - 1; `first` is a multiple of 4."""
    c0, c1, c2, c3 = philox(first // 4 + tl.arange(0, N // 4), stream, seed, position)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [N])


@triton.jit
def word_at(index, stream, seed, position):
    """The word of each draw of `index`."""
    c0, c1, c2, c3 = philox(index // 4, stream, seed, position)
    which = index % 4
    return tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))


@triton.jit
def gumbel(word):
    """-log E of the exponential E = -log(1 - u), float64; 1 - u is exact."""
    return -tl.log(-tl.log((4294967295.5 - word.to(tl.float64)) * 2.3283064365386963e-10))


@triton.jit
def key_of(x, DROP: tl.constexpr):
    """Unsigned integers in the order of the logits, without the DROP lowest bits, which those above determine."""
    if x.dtype == tl.float64:
        bits = tl.where(x == 0, 0.0, x).to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) | (-9223372036854775807 - 1))
        return key.to(tl.uint64, bitcast=True)
    else:
        bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) | (-2147483647 - 1))
        return key.to(tl.uint32, bitcast=True) >> DROP


@triton.jit
def logits_at(row_ptr, index, num_valid, FP64: tl.constexpr):
    """Entries of a row and where they are NaN; -inf for NaN and behind the end."""
    x = tl.load(row_ptr + index, mask=index < num_valid, other=-float("inf"))
    x = x.to(tl.float64) if FP64 else x.to(tl.float32)
    nan = x != x
    return tl.where(nan, -float("inf"), x), nan


@triton.jit
def log_weight(x, top, temperature):
    """(x - top) / temperature in float64, 0 at the top and -inf at -inf; x and top are float64."""
    below = tl.where(x == top, 0.0, x - top)
    return tl.where(x == -float("inf"), -float("inf"), below / temperature)


@triton.jit
def lowest_best(score, index):
    """The lowest index of the largest score, -1 where no score is above -inf."""
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(score == best, index, FAR), axis=0)
    return tl.where(best > -float("inf"), first, -1)
