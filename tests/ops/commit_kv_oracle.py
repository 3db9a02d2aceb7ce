"""commit_kv slot by slot in plain Python: a dictionary of the cache and a list of what is written to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from dmtp_kernels.ops.commit_kv import BAD_COUNT, BAD_OWNER, BAD_SLOT


def model(
    rows: torch.Tensor,
    cache: torch.Tensor,
    valid: list[int],
    dst: torch.Tensor,
    *,
    pending: list[int] | None = None,
    promote: list[int] | None = None,
    scratch: torch.Tensor | None = None,
    live: list[bool] | None = None,
    first_slot: int = 0,
    placed: Callable[[int, int], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """A flat cache after the commit, and the error bits; `placed(b, j)` is a row as the cache holds it."""
    before = {slot: cache[slot].clone() for slot in range(len(cache))}
    width = rows.shape[1]
    errors = [0] * len(valid)
    promotions: list[tuple[int, int, int]] = []  # request, from, to
    writes: list[tuple[int, int, torch.Tensor]] = []  # request, slot, value
    for b, given in enumerate(valid):
        if live is not None and not live[b]:
            continue
        count = min(max(given, 0), width)
        errors[b] |= BAD_COUNT if count != given else 0
        if count == 0:
            continue
        if pending is not None and promote is not None and first_slot <= pending[b] < len(cache):
            promotions.append((b, pending[b], promote[b]))
        for j in range(width):
            if j == count - 1 and pending is not None:
                slot = pending[b]
            elif j < count:
                slot = int(dst[b, j])
            else:
                slot = -1 if scratch is None else int(scratch[b, j])
            writes.append((b, slot, placed(b, j) if placed else rows[b, j].to(cache.dtype)))

    writers = defaultdict(set)
    for b, _, slot in promotions:
        if slot >= first_slot:
            writers[slot].add(b)
    for b, slot, _ in writes:
        writers[slot].add(b)
    moved = []
    for b, source, target in promotions:
        value = before[source]
        if first_slot <= target < len(cache) and target != source and writers[source] != {b}:
            errors[b] |= BAD_OWNER
            value = before[target]
        moved.append((b, target, value))
    after = dict(before)
    for b, slot, value in [*moved, *writes]:
        if slot >= len(cache):
            errors[b] |= BAD_SLOT
        elif slot >= first_slot:
            after[slot] = value
    return torch.stack([after[slot] for slot in range(len(cache))]) if len(cache) else cache.clone(), errors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, and NaN for NaN."""
    if a.dtype.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
