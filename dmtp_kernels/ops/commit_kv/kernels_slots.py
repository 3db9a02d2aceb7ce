"""Where the rows of a commit go and which of them win: device functions of kernels.py.

`places` are the pointers and strides `(valid, dst, pending, promote, scratch, live)`; a slot of -1 is none. Slots that
lie in the cache, unlike what callers give, fit 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_of(b, places, width):
    """Rows of request b (or of several) that are true, 0 where it is dead."""
    valid = tl.load(places[0] + b * places[1]).to(tl.int64)
    count = tl.minimum(tl.maximum(valid, 0), width)
    if places[10] is not None:
        count = tl.where(tl.load(places[10] + b * places[11]) != 0, count, 0)
    return count


@triton.jit
def _counts_of(b, mask, places, width):
    valid = tl.load(places[0] + b * places[1], mask=mask, other=0).to(tl.int64)
    count = tl.minimum(tl.maximum(valid, 0), width)
    if places[10] is not None:
        count = tl.where(tl.load(places[10] + b * places[11], mask=mask, other=0) != 0, count, 0)
    return count


@triton.jit
def slots_of(b, j, mask, places, width):  # [n] x3 -> [n] int64
    """Slots that rows j of requests b go to, as the caller gave them; -1 for rows that go nowhere."""
    b = b.to(tl.int64)
    count = _counts_of(b, mask, places, width)
    # nothing here waits for the counts: slots that are not used are read and dropped
    dst = tl.load(places[2] + b * places[3] + j, mask=mask, other=-1).to(tl.int64)
    slot = tl.where(j < count, dst, -1)
    if places[8] is not None:
        rest = tl.load(places[8] + b * places[9] + j, mask=mask, other=-1).to(tl.int64)
        slot = tl.where((j >= count) & (count > 0), rest, slot)
    if places[4] is not None:
        pending = tl.load(places[4] + b * places[5], mask=mask, other=-1).to(tl.int64)
        slot = tl.where(j == count - 1, pending, slot)
    return slot


@triton.jit
def promotion_of(b, count, places, num_slots, first_slot):
    """Slots that a request's pending row is read from and goes to, both -2 where it does not move."""
    source = count * 0 - 2
    target = source
    if places[4] is not None:
        pending = tl.load(places[4] + b * places[5]).to(tl.int64)
        promote = tl.load(places[6] + b * places[7]).to(tl.int64)
        moves = (count > 0) & (pending >= first_slot) & (pending < num_slots)
        moves &= (promote >= first_slot) & (promote < num_slots)
        source = tl.where(moves, pending, source)
        target = tl.where(moves, promote, target)
    return source.to(tl.int32), target.to(tl.int32)


@triton.jit
def scan(
    b, own, order, source, target, batch, width, places, num_slots, first_slot, SCAN: tl.constexpr
):  # [n] x2 of a request's rows
    """Looks at every write of the call.

    Returns which of the slots `own` a later row writes, whether any later write goes to `target`, whether another
    request writes `source`, and the last of the request's own rows that does (-1: none).
    """
    b = b.to(tl.int32)
    lost = order * 0
    overruled = tl.cast(0, tl.int32)
    taken = tl.cast(0, tl.int32)
    winner = tl.cast(-1, tl.int32)
    for start in range(0, batch * width, SCAN):
        f = start + tl.arange(0, SCAN)
        request = f // width
        slot = slots_of(request, f % width, f < batch * width, places, width)
        slot = tl.where((slot >= first_slot) & (slot < num_slots), slot, -1).to(tl.int32)
        later = (slot[None, :] == own[:, None]) & (f[None, :] > order[:, None])
        lost = tl.maximum(lost, tl.max(later.to(tl.int32), axis=1))
        if places[4] is not None:
            overruled = tl.maximum(overruled, tl.max((slot == target).to(tl.int32), axis=0))
            at_source = slot == source
            taken = tl.maximum(taken, tl.max((at_source & (request != b)).to(tl.int32), axis=0))
            winner = tl.maximum(winner, tl.max(tl.where(at_source & (request == b), f % width, -1), axis=0))
    if places[4] is not None:
        for start in range(0, batch, SCAN):
            request = start + tl.arange(0, SCAN)
            mask = request < batch
            count = _counts_of(request.to(tl.int64), mask, places, width)
            pending = tl.load(places[4] + request.to(tl.int64) * places[5], mask=mask, other=-1).to(tl.int64)
            promote = tl.load(places[6] + request.to(tl.int64) * places[7], mask=mask, other=-1).to(tl.int64)
            moves = (count > 0) & (pending >= first_slot) & (pending < num_slots)
            moves &= (promote >= first_slot) & (promote < num_slots)
            promote = tl.where(moves, promote, -1).to(tl.int32)
            overruled = tl.maximum(overruled, tl.max(((promote == target) & (request > b)).to(tl.int32), axis=0))
            taken = tl.maximum(taken, tl.max(((promote == source) & (request != b)).to(tl.int32), axis=0))
    return lost, overruled, taken, winner
