"""The commit in eager PyTorch: the definition every kernel must match, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels.ops.commit_kv import BAD_COUNT, BAD_SLOT


def commit_kv(
    rows_k: Sequence[torch.Tensor],  # L x [B, R, Hkv, Dk]
    rows_v: Sequence[torch.Tensor],  # L x [B, R, Hkv, Dv]
    k_caches: Sequence[torch.Tensor],  # L x [num_slots, Hkv, Dk] or [num_pages, page_size, Hkv, Dk], mutated
    v_caches: Sequence[torch.Tensor],
    valid: torch.Tensor,  # [B]
    dst: torch.Tensor,  # [B, R]
    pending_slot: torch.Tensor | None,  # [B]
    promote_dst: torch.Tensor | None,  # [B]
    scratch_dst: torch.Tensor | None,  # [B, R]
    hidden: torch.Tensor | None,  # [B, R, H]
    next_hidden: torch.Tensor | None,  # [B, H] mutated
    lengths: torch.Tensor | None,  # [B] mutated
    live: torch.Tensor | None,  # [B]
    first_slot: int,
    error: torch.Tensor,  # [B] out
) -> None:
    batch, width = dst.shape
    num_slots = _num_slots(k_caches[0])
    column = torch.arange(width, device=dst.device)
    alive = torch.ones_like(valid, dtype=torch.bool) if live is None else live
    count = valid.long().clamp(0, width) * alive  # [B]
    active = count > 0
    written = column < count[:, None]  # [B, R]

    slots = torch.where(written, dst.long(), -1)
    if scratch_dst is not None:
        slots = torch.where(active[:, None] & ~written, scratch_dst.long(), slots)
    promoted = torch.full_like(count, -1)
    source = promoted
    if pending_slot is not None and promote_dst is not None:
        slots = torch.where(column == count[:, None] - 1, pending_slot[:, None].long(), slots)
        source = pending_slot.long()
        inside = (source >= first_slot) & (source < num_slots)
        promoted = torch.where(active & inside, promote_dst.long(), -1)

    beyond = (slots >= num_slots).any(dim=1) | (promoted >= num_slots)
    miscounted = alive & ((valid < 0) | (valid > width))
    error.copy_(miscounted * BAD_COUNT + beyond * BAD_SLOT)
    if batch > 0 and num_slots > 0:
        target, origin = _last_writers(torch.cat((promoted, slots.flatten())), first_slot, num_slots)
        source = source.clamp(0, num_slots - 1)
        for rows, cache in (*zip(rows_k, k_caches, strict=True), *zip(rows_v, v_caches, strict=True)):
            # one spare candidate, row 0 as it is, for a call that writes nothing
            old = cache[_index(cache, torch.cat((source, torch.zeros_like(source[:1]))))]
            values = torch.cat((old[:batch], rows.flatten(0, 1).to(cache.dtype), old[batch:]))
            cache.index_put_(_index(cache, target), values[origin])

    if hidden is not None and next_hidden is not None:
        chosen = hidden[torch.arange(batch, device=dst.device), (count - 1).clamp(min=0)]
        next_hidden.copy_(torch.where(active[:, None], chosen, next_hidden))
    if lengths is not None:
        lengths.add_(count.to(lengths.dtype))


def _last_writers(slots: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot and source of every write, such that all writes to one slot carry the same source, the last one listed.

    Skipped writes (slots outside low..high-1) repeat another write; without any, they put row `len(slots)` into slot 0.
    So the store needs no data-dependent shape and its order does not matter.
    """
    key = torch.where((slots >= low) & (slots < high), slots, high)
    ordered, order = torch.sort(key, stable=True)
    any_write = ordered[0] < high
    target = torch.where(key < high, key, ordered[0])
    origin = order[torch.searchsorted(ordered, target, right=True) - 1]
    return torch.where(any_write, target, 0), torch.where(any_write, origin, len(slots))


def _num_slots(cache: torch.Tensor) -> int:
    return cache.shape[0] if cache.dim() == 3 else cache.shape[0] * cache.shape[1]


def _index(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if cache.dim() == 3:
        return (slots,)
    return slots // cache.shape[1], slots % cache.shape[1]
