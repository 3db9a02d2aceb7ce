"""Triton kernels of the head: from group values to keys or lists."""

from __future__ import annotations

import triton
import triton.language as tl

from dmtp_kernels.ops.lm_head.kernels import _NO_TOKEN, ABSENT, NO_KEY, canonical_dots, encode, token_ids, unordered
from dmtp_kernels.ops.lm_head.reference import _TINY

_UNDERFLOW = tl.constexpr(_TINY)
_NEGATIVE_INF = tl.constexpr(-0x7F800001)  # `ordered(-inf)`


@triton.jit
def _lower_bound(threshold):
    """Proved lower bound of the k-th best logit, less what products lose to underflow."""
    return unordered(tl.maximum(threshold, _NEGATIVE_INF)) - _UNDERFLOW


@triton.jit
def _reached(value, threshold, CERTIFIED: tl.constexpr, BF16: tl.constexpr):
    """Groups that may hold one of the best rows."""
    if CERTIFIED:
        limit = _lower_bound(threshold)
        high = unordered(value)
        if BF16:
            # rounding is monotone, so the comparison may be made after it
            limit = tl.cast(tl.cast(limit, tl.bfloat16), tl.float32)
            high = high.to(tl.bfloat16).to(tl.float32)
        # a NaN upper end reaches everything
        return (value != ABSENT) & ((high >= limit) | (high != high))
    return value >= threshold


@triton.jit
def _insert(best, keys, TOP: tl.constexpr, R: tl.constexpr):
    """The TOP greatest of `best [TOP]` and `keys [R]`, in no order."""
    if TOP == 1:
        return tl.maximum(best, tl.max(keys, axis=0))
    slot, place = tl.arange(0, TOP), tl.arange(0, R)
    worst = tl.min(best, axis=0)
    candidate = tl.max(keys, axis=0)
    while candidate > worst:
        out = tl.min(tl.where(best == worst, slot, TOP), axis=0)
        best = tl.where(slot == out, candidate, best)
        taken = tl.min(tl.where(keys == candidate, place, R), axis=0)
        keys = tl.where(place == taken, NO_KEY, keys)
        worst = tl.min(best, axis=0)
        candidate = tl.max(keys, axis=0)
    return best


@triton.jit
def _nth_greatest(values, rank):
    """The rank-th greatest of `values` int32, bit by bit; the least int32 when fewer are not `ABSENT`."""
    low = tl.full((), ABSENT, tl.int32)
    for bit in range(31, -1, -1):
        # the first step, 2^31, wraps from the least int32 to 0
        trial = low + (tl.full((), 1, tl.int32) << bit)
        low = tl.where(tl.sum((values >= trial).to(tl.int32), axis=0) >= rank, trial, low)
    return low


@triton.jit
def _threshold(pool, n, held, stride_pool, rank, POOL: tl.constexpr):
    """What a group must reach: the one value of the pool, or its rank-th greatest."""
    if POOL == 1:
        return tl.load(pool + n)
    index = tl.arange(0, POOL)
    values = tl.load(pool + n.to(tl.int64) * stride_pool + index, mask=index < held, other=ABSENT)
    return _nth_greatest(values, rank)


@triton.jit(do_not_specialize=["share", "rank", "groups"])
def lm_head_pool_kernel(
    values,  # [n, group_stride] int32
    pool,  # [n, splits, rank] int32 out
    share,
    groups,
    group_stride,
    rank,
    BLOCK: tl.constexpr,
):
    """The rank greatest values of one share of a state's groups, filled up with the last of them."""
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    group = split * share + index
    held = tl.load(values + n * group_stride + group, mask=(index < share) & (group < groups), other=ABSENT)
    limit = _nth_greatest(held, rank)
    above = held > limit
    slot = tl.cumsum(above.to(tl.int32), axis=0) - 1
    at = pool + (n * tl.num_programs(1) + split) * rank
    tl.store(at + slot, held, mask=above)
    count = tl.sum(above.to(tl.int32), axis=0)
    for start in range(0, rank, BLOCK):
        tl.store(at + start + index, limit, mask=(start + index >= count) & (start + index < rank))


@triton.jit(do_not_specialize=["num_valid", "id_offset", "share", "held", "rank", "groups"])
def lm_head_finish_kernel(
    hidden,  # [n, H]
    weight,  # [V, H]
    id_map,  # [V]
    upper,  # [n, group_stride] int32, None: every row is scored
    pool,  # [n, held] int32, see `_threshold`
    key,  # [n] int64, raised when TOP is 1
    status,  # [n] int32
    lists,  # [n, splits, TOP] int64 out otherwise
    num_valid,
    id_offset,
    share,
    held,
    rank,
    groups,
    group_stride,
    size,
    stride_pool,
    stride_hidden,
    stride_weight,
    stride_key,
    stride_status,
    CERTIFIED: tl.constexpr,
    BF16: tl.constexpr,
    MAP: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    POOL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Canonical dots of every row in a group that reaches the threshold, in this program's share of the groups."""
    n = tl.program_id(0)
    split = tl.program_id(1)
    wide = n.to(tl.int64)
    state = hidden + wide * stride_hidden
    best = tl.full((TOP,), NO_KEY, tl.int64)
    limit = tl.full((), 0, tl.int32)
    if upper is not None:
        limit = _threshold(pool, n, held, stride_pool, rank, POOL)
    index = tl.arange(0, BLOCK)
    slot, place = tl.arange(0, R // GROUP), tl.arange(0, R) % GROUP
    last = tl.minimum((split + 1) * share, groups)
    for start in range(split * share, last, BLOCK):
        group = start + index
        alive = group < last
        if upper is not None:
            value = tl.load(upper + wide * group_stride + group, mask=alive, other=ABSENT)
            alive = alive & _reached(value, limit, CERTIFIED, BF16)
        left = tl.sum(alive.to(tl.int32), axis=0)
        if left > 0:
            place_of = tl.cumsum(alive.to(tl.int32), axis=0)
            for done in range(0, left, R // GROUP):
                wanted = alive[None, :] & (place_of[None, :] == done + 1 + slot[:, None])
                picked = tl.max(tl.where(wanted, group[None, :], -1), axis=1)  # [R // GROUP]
                rows = tl.reshape(tl.broadcast_to(picked[:, None], (R // GROUP, GROUP)), (R,)) * GROUP + place
                real = (rows >= 0) & (rows < num_valid)
                token = token_ids(rows, real, id_map, id_offset, MAP)
                at = weight + rows.to(tl.int64) * stride_weight
                logit = canonical_dots(state, at, token >= 0, size, R, STAGES)
                best = _insert(best, encode(logit, token, BF16), TOP, R)
    if TOP == 1:
        found = tl.max(best, axis=0)
        tl.atomic_max(key + wide * stride_key, found, mask=found > NO_KEY, sem="relaxed")
        tl.atomic_and(status + wide * stride_status, ~_NO_TOKEN, mask=found > NO_KEY, sem="relaxed")
    else:
        tl.store(lists + (wide * tl.num_programs(1) + split) * TOP + tl.arange(0, TOP), best)


@triton.jit(do_not_specialize=["num_valid", "id_offset", "share", "width"])
def lm_head_rescore_kernel(
    hidden,  # [n, H]
    weight,  # [V, H]
    ids,  # [n, width]
    count,  # [n]
    lists,  # [n, splits, TOP] int64 out
    num_valid,
    id_offset,
    share,
    width,
    size,
    stride_hidden,
    stride_weight,
    stride_ids,
    stride_count,
    BF16: tl.constexpr,
    R: tl.constexpr,
    TOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Canonical dots of the listed rows of this rank, in this program's share of the list."""
    n = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    listed = tl.minimum(tl.load(count + n * stride_count).to(tl.int64), width).to(tl.int32)
    last = tl.minimum((split + 1) * share, listed)
    best = tl.full((TOP,), NO_KEY, tl.int64)
    for start in range(split * share, last, R):
        place = start + tl.arange(0, R)
        token = tl.load(ids + n * stride_ids + place, mask=place < last, other=-1).to(tl.int64)
        row = token - id_offset
        token = tl.where((token >= 0) & (row >= 0) & (row < num_valid), token, -1)
        logit = canonical_dots(hidden + n * stride_hidden, weight + row * stride_weight, token >= 0, size, R, STAGES)
        best = _insert(best, encode(logit, token, BF16), TOP, R)
    tl.store(lists + (n * tl.num_programs(1) + split) * TOP + tl.arange(0, TOP), best)


@triton.jit(do_not_specialize=["count", "k", "flags"])
def lm_head_merge_kernel(
    lists,  # [n, count] int64
    key,  # [n, k] int64 out
    status,  # [n] int32 out, or None
    count,
    k,
    flags,
    stride_row,
    stride_key,
    stride_status,
    BLOCK: tl.constexpr,
):
    """The k greatest keys of all splits, best first."""
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    keys = tl.load(lists + n * count + index, mask=index < count, other=NO_KEY)
    for i in range(k):
        best = tl.max(keys, axis=0)
        tl.store(key + n * stride_row + i * stride_key, best)
        if status is not None:
            tl.store(status + n * stride_status, flags | tl.where(best == NO_KEY, _NO_TOKEN, 0), mask=i == 0)
        taken = tl.min(tl.where(keys == best, index, BLOCK), axis=0)
        keys = tl.where(index == taken, NO_KEY, keys)


@triton.jit(do_not_specialize=["num_valid", "id_offset", "capacity", "held", "rank", "groups"])
def lm_head_list_kernel(
    upper,  # [n, group_stride] int32
    pool,  # [n, held] int32, see `_threshold`
    id_map,  # [V]
    ids,  # [n, capacity] int64 out
    count,  # [n] int32 out
    lower_bound,  # [n] fp32 out
    num_valid,
    id_offset,
    capacity,
    held,
    rank,
    groups,
    group_stride,
    stride_pool,
    stride_ids,
    stride_count,
    stride_bound,
    CERTIFIED: tl.constexpr,
    MAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL: tl.constexpr,
):
    """Head ids of the rows in groups that reach the threshold, ascending, -1 after them."""
    n = tl.program_id(0).to(tl.int64)
    limit = _threshold(pool, n, held, stride_pool, rank, POOL)
    index = tl.arange(0, BLOCK // GROUP)
    place = tl.arange(0, BLOCK)
    total = tl.full((), 0, tl.int32)
    for start in range(0, groups, BLOCK // GROUP):
        group = start + index
        value = tl.load(upper + n * group_stride + group, mask=group < groups, other=ABSENT)
        alive = (group < groups) & _reached(value, limit, CERTIFIED, False)
        if tl.max(alive.to(tl.int32), axis=0) > 0:
            row = start * GROUP + place
            listed = tl.reshape(tl.broadcast_to(alive[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,)) & (row < num_valid)
            listed = token_ids(row, listed, id_map, id_offset, MAP) >= 0
            slot = total + tl.cumsum(listed.to(tl.int32), axis=0) - 1
            tl.store(ids + n * stride_ids + slot, row.to(tl.int64) + id_offset, mask=listed & (slot < capacity))
            total += tl.sum(listed.to(tl.int32), axis=0)
    for start in range(0, capacity, BLOCK):
        slot = start + place
        tl.store(ids + n * stride_ids + slot, tl.full((BLOCK,), -1, tl.int64), mask=(slot >= total) & (slot < capacity))
    tl.store(count + n * stride_count, total)
    bound = _lower_bound(limit) if CERTIFIED else tl.full((), float("-inf"), tl.float32)
    tl.store(lower_bound + n * stride_bound, bound)
