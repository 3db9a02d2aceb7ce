"""The commit in eager PyTorch: the definition every kernel must match, bit for bit where rows are copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels.ops.commit_kv import BAD_COUNT, BAD_OWNER, BAD_POSITION, BAD_SLOT
from dmtp_kernels.ops.commit_kv.round_layers import cache_layers

_NAN = 0x7F  # of both fp8 formats


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
    k_scale: Sequence[torch.Tensor] | None,  # 1 or L x [], [1], [Hkv] or [B, Hkv]
    v_scale: Sequence[torch.Tensor] | None,
    k_norm: Sequence[torch.Tensor] | None,  # 1 or L x [Dk]
    k_norm_eps: float,
    k_norm_offset: float,
    cos_sin: torch.Tensor | None,  # [M, rotary_dim]
    positions: torch.Tensor | None,  # [B, R]
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
    source, taken = promoted, torch.zeros_like(active)
    if pending_slot is not None and promote_dst is not None:
        slots = torch.where(column == count[:, None] - 1, pending_slot[:, None].long(), slots)
        source = pending_slot.long()
        inside = (source >= first_slot) & (source < num_slots)
        promoted = torch.where(active & inside, promote_dst.long(), -1)
        moves = (promoted >= first_slot) & (promoted < num_slots) & (promoted != source)
        taken = moves & _written_by_others(source, torch.cat((promoted[:, None], slots), dim=1))
        # a promotion that may not read keeps what its slot holds
        source = torch.where(taken, promoted, source)

    beyond = (slots >= num_slots).any(dim=1) | (promoted >= num_slots)
    miscounted = alive & ((valid < 0) | (valid > width))
    flags = miscounted * BAD_COUNT + beyond * BAD_SLOT + taken * BAD_OWNER
    if cos_sin is not None and positions is not None:
        placed = (slots >= first_slot) & (slots < num_slots)
        flags = flags + (placed & ((positions < 0) | (positions >= len(cos_sin)))).any(dim=1) * BAD_POSITION
    error.copy_(flags)
    if batch > 0 and num_slots > 0:
        target, origin = _last_writers(torch.cat((promoted, slots.flatten())), first_slot, num_slots)
        source = source.clamp(0, num_slots - 1)
        for layer, (rows, cache) in enumerate(zip(rows_k, k_caches, strict=True)):
            rows = _normed(rows, _of(k_norm, layer), k_norm_eps, k_norm_offset, cache.dtype)
            rows = _rotated(rows, cos_sin, positions, cache.dtype)
            _store(_rounded(rows, _of(k_scale, layer), cache.dtype), cache, source, target, origin)
        for layer, (rows, cache) in enumerate(zip(rows_v, v_caches, strict=True)):
            _store(_rounded(rows, _of(v_scale, layer), cache.dtype), cache, source, target, origin)

    if hidden is not None and next_hidden is not None:
        chosen = hidden[torch.arange(batch, device=dst.device), (count - 1).clamp(min=0)]
        next_hidden.copy_(torch.where(active[:, None], chosen, next_hidden))
    if lengths is not None:
        lengths.add_(count.to(lengths.dtype))


def commit_round(
    rows_k: Sequence[torch.Tensor],  # layers of all caches x [B, R, Hkv, Dk]
    rows_v: Sequence[torch.Tensor],
    k_caches: Sequence[torch.Tensor],  # mutated
    v_caches: Sequence[torch.Tensor],
    valid: torch.Tensor,  # [B]
    dst: Sequence[torch.Tensor],  # caches x [B, R]
    layers: Sequence[int],  # of each cache
    pending_slot: torch.Tensor | None,  # [B], like the next two of the last cache
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,  # [B, R]
    hidden: torch.Tensor | None,  # [B, R, H]
    next_hidden: torch.Tensor | None,  # [B, H] mutated
    lengths: torch.Tensor | None,  # [B] mutated
    live: torch.Tensor | None,  # [B]
    first_slot: Sequence[int],  # 1 or one a cache
    k_scale: Sequence[torch.Tensor] | None,  # one a cache or one a layer
    v_scale: Sequence[torch.Tensor] | None,
    error: torch.Tensor,  # [B] out
) -> None:
    """`commit_kv` on one cache after the other."""
    error.zero_()
    part = torch.empty_like(error)
    for own in cache_layers(layers):
        of = slice(own.first, own.last)
        last = own.index == len(layers) - 1
        commit_kv(
            rows_k[of],
            rows_v[of],
            k_caches[of],
            v_caches[of],
            valid,
            dst[own.index],
            pending_slot if last else None,
            promote_dst if last else None,
            scratch_dst if last else None,
            hidden if last else None,
            next_hidden if last else None,
            lengths if last else None,
            live,
            first_slot[own.index if len(first_slot) > 1 else 0],
            own.scales(k_scale),
            own.scales(v_scale),
            None,
            0.0,
            0.0,
            None,
            None,
            part,
        )
        error.bitwise_or_(part)


def _of(tensors: Sequence[torch.Tensor] | None, layer: int) -> torch.Tensor | None:
    return None if tensors is None else tensors[layer if len(tensors) > 1 else 0]


def _written_by_others(slot: torch.Tensor, written: torch.Tensor) -> torch.Tensor:  # [B], [B, n] -> [B]
    hit = (slot[:, None, None] == written).any(dim=2)  # [B, B]
    return (hit & ~torch.eye(len(slot), dtype=torch.bool, device=slot.device)).any(dim=1)


def _wide(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.to(torch.float64 if torch.float64 in (rows.dtype, dtype) else torch.float32)


def _normed(
    rows: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> torch.Tensor:
    if weight is None:
        return rows
    x = _wide(rows, dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight.to(x.dtype))


def _rotated(
    rows: torch.Tensor, cos_sin: torch.Tensor | None, positions: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:  # [B, R, Hkv, Dk]
    if cos_sin is None or positions is None or len(cos_sin) == 0:
        return rows
    x = _wide(rows, dtype)
    angles = cos_sin[positions.long().clamp(0, len(cos_sin) - 1)].to(x.dtype)[:, :, None]  # [B, R, 1, rotary_dim]
    cos, sin = angles.chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _rounded(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if scale is not None:
        factor = scale.reshape(1, 1, 1, 1) if scale.numel() == 1 else scale[..., None, :, None]
        x = _wide(rows, dtype)
        rows = x / factor.to(x.dtype)
    if dtype.itemsize > 1:
        return rows.to(dtype)
    most = torch.finfo(dtype).max
    code = rows.clamp(-most, most).to(torch.float32).to(dtype).view(torch.uint8)
    return torch.where(rows.isnan(), _NAN, code).view(dtype)


def _store(
    rows: torch.Tensor, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor, origin: torch.Tensor
) -> None:
    """Write rows[B, R, Hkv, D] and the rows at `source[B]`, in front of them, to `target`."""
    if cache.dtype.itemsize == 1:
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
    # one spare candidate, row 0 as it is, for a call that writes nothing
    old = cache[_index(cache, torch.cat((source, torch.zeros_like(source[:1]))))]
    values = torch.cat((old[:-1], rows.flatten(0, 1), old[-1:]))
    cache.index_put_(_index(cache, target), values[origin])


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
