"""Launch of the Triton kernel of the commit: one for all caches of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops.commit_kv import kernels, reference
from dmtp_kernels.ops.commit_kv.config import MAX_SLOTS, CacheShape, commit_config
from dmtp_kernels.ops.commit_kv.round_layers import cache_layers

_FP8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # fraction bits
Strides = tuple[int, ...]
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Cache:
    """The layers of one cache; scales are none, one or one a layer."""

    rows_k: Tensors
    rows_v: Tensors
    k_caches: Tensors
    v_caches: Tensors
    dst: torch.Tensor
    first_slot: int
    k_scale: Tensors | None
    v_scale: Tensors | None

    @property
    def page_size(self) -> int:
        cache = self.k_caches[0]
        return max(cache.shape[1], 1) if cache.dim() == 4 else 1

    @property
    def num_slots(self) -> int:
        cache = self.k_caches[0]
        return cache.shape[0] * cache.shape[1] if cache.dim() == 4 else cache.shape[0]

    @property
    def copied(self) -> bool:
        same = all(r[0].dtype == c[0].dtype for r, c in ((self.rows_k, self.k_caches), (self.rows_v, self.v_caches)))
        return same and self.k_scale is None and self.v_scale is None

    def fits(self) -> bool:
        return self.num_slots <= MAX_SLOTS and self.dst.numel() <= MAX_SLOTS // 2


def commit_kv(
    rows_k: Tensors,  # L x [B, R, Hkv, Dk]
    rows_v: Tensors,  # L x [B, R, Hkv, Dv]
    k_caches: Tensors,  # L x [num_slots, Hkv, Dk] or [num_pages, page_size, Hkv, Dk], mutated
    v_caches: Tensors,
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
    k_scale: Tensors | None,  # 1 or L x [], [1], [Hkv] or [B, Hkv]
    v_scale: Tensors | None,
    k_norm: Tensors | None,  # 1 or L x [Dk]
    k_norm_eps: float,
    k_norm_offset: float,
    cos_sin: torch.Tensor | None,  # [M, rotary_dim]
    positions: torch.Tensor | None,  # [B, R]
    error: torch.Tensor,  # [B] out
) -> None:
    cache = _Cache(rows_k, rows_v, k_caches, v_caches, dst, first_slot, k_scale, v_scale)
    if not cache.fits():
        reference.commit_kv(
            rows_k, rows_v, k_caches, v_caches, valid, dst, pending_slot, promote_dst, scratch_dst, hidden, next_hidden,
            lengths, live, first_slot, k_scale, v_scale, k_norm, k_norm_eps, k_norm_offset, cos_sin, positions, error,
        )  # fmt: skip
        return
    _launch(
        [cache], valid, pending_slot, promote_dst, scratch_dst, hidden, next_hidden, lengths, live, k_norm, k_norm_eps,
        k_norm_offset, cos_sin, positions, error,
    )  # fmt: skip


def commit_round(
    rows_k: Tensors,  # layers of all caches x [B, R, Hkv, Dk]
    rows_v: Tensors,
    k_caches: Tensors,  # mutated
    v_caches: Tensors,
    valid: torch.Tensor,  # [B]
    dst: Tensors,  # caches x [B, R]
    layers: Sequence[int],  # of each cache
    pending_slot: torch.Tensor | None,  # [B], like the next two of the last cache
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,  # [B, R]
    hidden: torch.Tensor | None,  # [B, R, H]
    next_hidden: torch.Tensor | None,  # [B, H] mutated
    lengths: torch.Tensor | None,  # [B] mutated
    live: torch.Tensor | None,  # [B]
    first_slot: Sequence[int],  # 1 or one a cache
    k_scale: Tensors | None,  # one a cache or one a layer
    v_scale: Tensors | None,
    error: torch.Tensor,  # [B] out
) -> None:
    caches = []
    for own in cache_layers(layers):
        of = slice(own.first, own.last)
        first = first_slot[own.index if len(first_slot) > 1 else 0]
        scales = own.scales(k_scale), own.scales(v_scale)
        caches.append(_Cache(rows_k[of], rows_v[of], k_caches[of], v_caches[of], dst[own.index], first, *scales))
    if not all(cache.fits() for cache in caches):
        reference.commit_round(
            rows_k, rows_v, k_caches, v_caches, valid, dst, layers, pending_slot, promote_dst, scratch_dst, hidden,
            next_hidden, lengths, live, first_slot, k_scale, v_scale, error,
        )  # fmt: skip
        return
    _launch(
        caches, valid, pending_slot, promote_dst, scratch_dst, hidden, next_hidden, lengths, live, None, 1e-6, 0.0,
        None, None, error,
    )  # fmt: skip


def _launch(
    caches: Sequence[_Cache],
    valid: torch.Tensor,
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
    k_norm: Tensors | None,
    k_norm_eps: float,
    k_norm_offset: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    error: torch.Tensor,
) -> None:
    """Slots of the last cache may be pending and scratch; norm and rotation are of the K rows of all."""
    batch, width = caches[0].dst.shape
    if batch == 0:
        return
    heads, dims_k = zip(*(c.rows_k[0].shape[2:] for c in caches), strict=True)
    dims_v = tuple(c.rows_v[0].shape[3] for c in caches)
    hidden_size = 0 if hidden is None else hidden.shape[2]
    plain = k_norm is None and cos_sin is None
    shapes = [
        CacheShape(h, max(k, v), c.rows_k[0].element_size(), plain and c.copied)
        for h, k, v, c in zip(heads, dims_k, dims_v, caches, strict=True)
    ]
    config = commit_config(width, shapes, not processors(valid.device))
    tiles = -(-width // config.rows)
    columns = min(config.columns, max(16, 1 << (hidden_size - 1).bit_length())) if hidden_size else 16
    parts = max(1, -(-hidden_size // columns))
    units = sum(2 * len(c.rows_k) * -(-h // g) for c, h, g in zip(caches, heads, config.heads, strict=True))
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    rows_k, rows_v = [c.rows_k for c in caches], [c.rows_v for c in caches]
    k_caches, v_caches = [c.k_caches for c in caches], [c.v_caches for c in caches]
    scales_k, scales_v = [c.k_scale or () for c in caches], [c.v_scale or () for c in caches]
    # Triton launches on the current device
    with torch.cuda.device(valid.device) if valid.device.type == "cuda" else nullcontext():
        kernels.commit_kv_kernel[(batch * (tiles * units + parts),)](
            _flat(rows_k), *_strides(rows_k, _of_rows), _flat(rows_v), *_strides(rows_v, _of_rows),
            _bytes(k_caches), *_strides(k_caches, _of_cache), _bytes(v_caches), *_strides(v_caches, _of_cache),
            valid, valid.stride(0), live, _stride(live),
            tuple(c.dst for c in caches), tuple(c.dst.stride(0) for c in caches),
            pending_slot, _stride(pending_slot), promote_dst, _stride(promote_dst), scratch_dst, _stride(scratch_dst),
            hidden, _stride(hidden), 0 if hidden is None else hidden.stride(1), next_hidden, _stride(next_hidden),
            lengths, _stride(lengths), error, error.stride(0),
            *_scales(scales_k), *_scales(scales_v), None if k_norm is None else tuple(k_norm),
            cos_sin if rotary else None, _stride(cos_sin), 0 if cos_sin is None else cos_sin.shape[0],
            positions if rotary else None, _stride(positions),
            batch, width, tuple(c.num_slots for c in caches), tuple(c.first_slot for c in caches), hidden_size, tiles,
            EPS=k_norm_eps, OFFSET=k_norm_offset, STARTS=_starts(rows_k), SCALES_K=_starts(scales_k),
            SCALES_V=_starts(scales_v), PAGE=tuple(c.page_size for c in caches), HEADS=heads, DK=dims_k, DV=dims_v,
            GROUP=config.heads, DKP=tuple(map(_power, dims_k)), DVP=tuple(map(_power, dims_v)),
            FP8_K=_codes(k_caches), FP8_V=_codes(v_caches), ROWS=config.rows, SCAN=config.scan, COLUMNS=columns,
            PARTS=parts, ROTARY=rotary, num_warps=config.warps,
        )  # fmt: skip


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _flat(lists: Iterable[Tensors]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensors in lists for tensor in tensors)


def _starts(lists: Iterable[Tensors]) -> tuple[int, ...]:
    return tuple(accumulate(map(len, lists), initial=0))


def _codes(caches: Iterable[Tensors]) -> tuple[int, ...]:
    return tuple(_FP8.get(c[0].dtype, 0) for c in caches)


def _bytes(caches: Iterable[Tensors]) -> tuple[torch.Tensor, ...]:
    return tuple(c.view(torch.uint8) if c.dtype in _FP8 else c for c in _flat(caches))


def _of_rows(rows: torch.Tensor) -> Strides:
    return rows.stride()[:3]


def _of_cache(cache: torch.Tensor) -> Strides:
    """Of pages, rows of a page and heads; a flat cache has pages of one row."""
    return cache.stride()[:3] if cache.dim() == 4 else (cache.stride(0), 0, cache.stride(1))


def _strides(lists: Sequence[Tensors], of: Callable[[torch.Tensor], Strides]) -> list[Strides]:
    """Per dimension one stride a cache where the layers of each agree, else one a layer."""
    found = [[of(tensor) for tensor in tensors] for tensors in lists]
    if all(s == own[0] for own in found for s in own):
        found = [own[:1] for own in found]
    return list(zip(*(s for own in found for s in own), strict=True))


def _scales(scales: Sequence[Tensors]) -> tuple[tuple[torch.Tensor, ...] | None, Strides, Strides]:
    """Scales of the caches that have some and their strides over requests and heads."""
    flat = _flat(scales)
    if not flat:
        return None, (0,), (0,)
    strides = [
        (0, 0) if s.numel() == 1 else (0, s.stride(0)) if s.dim() == 1 else (s.stride(0), s.stride(1)) for s in flat
    ]
    over_requests, over_heads = zip(*strides, strict=True)
    return flat, over_requests, over_heads
