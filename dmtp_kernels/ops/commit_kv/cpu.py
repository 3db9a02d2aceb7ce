"""The commit on the compiled CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops.commit_kv.round_layers import cache_layers


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
    """As `reference.commit_kv`."""
    factors = dst.shape[0], rows_k[0].shape[2]
    backends.compiled().commit_kv(
        rows_k,
        rows_v,
        k_caches,
        v_caches,
        valid,
        dst,
        pending_slot,
        promote_dst,
        scratch_dst,
        hidden,
        next_hidden,
        lengths,
        live,
        first_slot,
        [scale.expand(factors) for scale in k_scale or ()],
        [scale.expand(factors) for scale in v_scale or ()],
        k_norm or (),
        k_norm_eps,
        k_norm_offset,
        cos_sin,
        positions,
        error,
    )


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
    """As `reference.commit_round`."""
    backends.compiled().commit_round(
        rows_k,
        rows_v,
        k_caches,
        v_caches,
        valid,
        dst,
        layers,
        pending_slot,
        promote_dst,
        scratch_dst,
        hidden,
        next_hidden,
        lengths,
        live,
        first_slot,
        _expanded(k_scale, layers, rows_k),
        _expanded(v_scale, layers, rows_v),
        error,
    )


def _expanded(
    scales: Sequence[torch.Tensor] | None, layers: Sequence[int], rows: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:  # per layer [B, Hkv]
    found: list[torch.Tensor | None] = []
    for own in cache_layers(layers) if scales is not None else ():
        given = own.scales(scales)
        for layer in range(own.first, own.last):
            scale = None if given is None else given[layer - own.first if len(given) > 1 else 0]
            found.append(None if scale is None else scale.expand(rows[layer].shape[0], rows[layer].shape[2]))
    return found
