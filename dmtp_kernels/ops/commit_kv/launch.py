"""Launch of the Triton kernel of the commit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops.commit_kv import kernels, reference
from dmtp_kernels.ops.commit_kv.config import MAX_SLOTS, commit_config

_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
Strides = list[tuple[int, ...]]


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
    if batch == 0:
        return
    heads, dim_k, dim_v = rows_k[0].shape[2], rows_k[0].shape[3], rows_v[0].shape[3]
    paged = k_caches[0].dim() == 4
    page_size = max(k_caches[0].shape[1], 1) if paged else 1
    num_slots = k_caches[0].shape[0] * (k_caches[0].shape[1] if paged else 1)
    hidden_size = 0 if hidden is None else hidden.shape[2]
    if num_slots > MAX_SLOTS or batch * width > MAX_SLOTS // 2:
        reference.commit_kv(
            rows_k, rows_v, k_caches, v_caches, valid, dst, pending_slot, promote_dst, scratch_dst, hidden, next_hidden,
            lengths, live, first_slot, k_scale, v_scale, k_norm, k_norm_eps, k_norm_offset, cos_sin, positions, error,
        )  # fmt: skip
        return
    copied = (rows_k[0].dtype, rows_v[0].dtype) == (k_caches[0].dtype, v_caches[0].dtype)
    copied = copied and k_scale is None and v_scale is None and k_norm is None and cos_sin is None
    config = commit_config(
        width, heads, max(dim_k, dim_v), rows_k[0].element_size(), copied, not processors(valid.device)
    )
    tiles = -(-width // config.rows)
    columns = min(config.columns, max(16, 1 << (hidden_size - 1).bit_length())) if hidden_size else 16
    parts = max(1, -(-hidden_size // columns))
    programs = batch * (2 * len(rows_k) * tiles * -(-heads // config.heads) + parts)
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    # Triton launches on the current device
    with torch.cuda.device(valid.device) if valid.device.type == "cuda" else nullcontext():
        kernels.commit_kv_kernel[(programs,)](
            tuple(rows_k), *_row_strides(rows_k), tuple(rows_v), *_row_strides(rows_v),
            _bytes(k_caches), *_cache_strides(k_caches), _bytes(v_caches), *_cache_strides(v_caches),
            valid, valid.stride(0), dst, dst.stride(0), pending_slot, _stride(pending_slot),
            promote_dst, _stride(promote_dst), scratch_dst, _stride(scratch_dst), live, _stride(live),
            hidden, _stride(hidden), 0 if hidden is None else hidden.stride(1), next_hidden, _stride(next_hidden),
            lengths, _stride(lengths), error, error.stride(0),
            *_scales(k_scale), *_scales(v_scale), None if k_norm is None else tuple(k_norm),
            cos_sin if rotary else None, _stride(cos_sin), 0 if cos_sin is None else cos_sin.shape[0],
            positions if rotary else None, _stride(positions),
            batch, width, num_slots, first_slot, hidden_size, tiles,
            EPS=k_norm_eps, OFFSET=k_norm_offset, PAGE=page_size, HEADS=heads, DK=dim_k, DV=dim_v,
            ROWS=config.rows, GROUP=config.heads, DKP=_power(dim_k), DVP=_power(dim_v), SCAN=config.scan,
            COLUMNS=columns, PARTS=parts, ROTARY=rotary,
            FP8_K=_FP8.get(k_caches[0].dtype), FP8_V=_FP8.get(v_caches[0].dtype), num_warps=config.warps,
        )  # fmt: skip


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _bytes(caches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(c.view(torch.uint8) for c in caches) if caches[0].dtype in _FP8 else tuple(caches)


def _shared(strides: Strides) -> Strides:
    """Per dimension the strides of all layers: one where they agree."""
    return [s[:1] if len(set(s)) == 1 else s for s in strides]


def _row_strides(rows: Sequence[torch.Tensor]) -> Strides:
    return _shared(list(zip(*(r.stride()[:3] for r in rows), strict=True)))


def _cache_strides(caches: Sequence[torch.Tensor]) -> Strides:
    """Of pages, rows of a page and heads; a flat cache has pages of one row."""
    if caches[0].dim() == 4:
        return _shared(list(zip(*(c.stride()[:3] for c in caches), strict=True)))
    return _shared([tuple(c.stride(0) for c in caches), (0,), tuple(c.stride(1) for c in caches)])


def _scales(
    scales: Sequence[torch.Tensor] | None,
) -> tuple[tuple[torch.Tensor, ...] | None, tuple[int, ...], tuple[int, ...]]:
    """Scales and their strides over requests and heads."""
    if scales is None:
        return None, (0,), (0,)
    strides = [
        (0, 0) if s.numel() == 1 else (0, s.stride(0)) if s.dim() == 1 else (s.stride(0), s.stride(1)) for s in scales
    ]
    over_requests, over_heads = _shared(list(zip(*strides, strict=True)))
    return tuple(scales), over_requests, over_heads
