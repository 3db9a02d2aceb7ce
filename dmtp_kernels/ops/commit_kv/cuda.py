"""The commit on the compiled CUDA kernels: one launch for all caches of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops.commit_kv import reference
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
    """As `reference.commit_kv`; heads of more than 512 elements that are computed on go there."""
    layers = len(rows_k)
    scales = [*_of_layers(k_scale, rows_k), *_of_layers(v_scale, rows_v)]
    norms = [*_picked(k_norm, layers), *[None] * layers]
    taken = backends.cuda_library().commit(
        [*rows_k, *rows_v], [*k_caches, *v_caches], [0] * (2 * layers), *_indexed(scales), *_indexed(norms),
        layers if cos_sin is not None else 0, valid, [dst], [first_slot], pending_slot, promote_dst, scratch_dst,
        hidden, next_hidden, lengths, live, k_norm_eps, k_norm_offset, cos_sin, positions, error,
    )  # fmt: skip
    if not taken:
        reference.commit_kv(
            rows_k, rows_v, k_caches, v_caches, valid, dst, pending_slot, promote_dst, scratch_dst, hidden, next_hidden,
            lengths, live, first_slot, k_scale, v_scale, k_norm, k_norm_eps, k_norm_offset, cos_sin, positions, error,
        )  # fmt: skip


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
    owners, scales_k, scales_v = [], [], []
    for own in cache_layers(layers):
        of = slice(own.first, own.last)
        owners += [own.index] * (own.last - own.first)
        scales_k += _of_layers(own.scales(k_scale), rows_k[of])
        scales_v += _of_layers(own.scales(v_scale), rows_v[of])
    firsts = list(first_slot) if len(first_slot) > 1 else [first_slot[0]] * len(dst)
    taken = backends.cuda_library().commit(
        [*rows_k, *rows_v], [*k_caches, *v_caches], owners * 2, *_indexed([*scales_k, *scales_v]), [],
        [-1] * (2 * len(rows_k)), 0, valid, dst, firsts, pending_slot, promote_dst, scratch_dst, hidden, next_hidden,
        lengths, live, 0.0, 0.0, None, None, error,
    )  # fmt: skip
    if not taken:
        reference.commit_round(
            rows_k, rows_v, k_caches, v_caches, valid, dst, layers, pending_slot, promote_dst, scratch_dst, hidden,
            next_hidden, lengths, live, first_slot, k_scale, v_scale, error,
        )  # fmt: skip


def _picked(given: Sequence[torch.Tensor] | None, count: int) -> list[torch.Tensor | None]:
    """One a layer, of none, one for all, or one a layer."""
    return [given[i if len(given) > 1 else 0] if given else None for i in range(count)]


def _of_layers(scales: Sequence[torch.Tensor] | None, rows: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Scales `[B, Hkv]` of the layers."""
    picked = _picked(scales, len(rows))
    return [None if s is None else s.expand(r.shape[0], r.shape[2]) for s, r in zip(picked, rows, strict=True)]


def _indexed(given: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[int]]:
    """Those that are there, and where each is among them, -1 for none."""
    there = [tensor for tensor in given if tensor is not None]
    numbers = iter(range(len(there)))
    return there, [-1 if tensor is None else next(numbers) for tensor in given]
