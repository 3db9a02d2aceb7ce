"""Placement of a round's rows: history, pending slot, scratch, predictor hidden, length; one cache or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dmtp_kernels._supports import takes_packed
from dmtp_kernels.ops._checks import as_scale, check_list, check_whole
from dmtp_kernels.ops.commit_kv.op import COMMIT_KV
from dmtp_kernels.ops.commit_kv.op_round import COMMIT_ROUND

BAD_COUNT, BAD_SLOT, BAD_OWNER, BAD_POSITION = 1, 2, 4, 8
"""Bits of the returned error: a count outside 0..R was clamped; a slot beyond the cache was skipped; another request
writes the pending slot, so it was not promoted; a position outside the rotary table was clamped."""

_Scale = torch.Tensor | float


@takes_packed()
def commit_kv(
    rows_k: Sequence[torch.Tensor],
    rows_v: Sequence[torch.Tensor],
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    valid: torch.Tensor,
    dst: torch.Tensor,
    *,
    pending_slot: torch.Tensor | None = None,
    promote_dst: torch.Tensor | None = None,
    scratch_dst: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    next_hidden: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    first_slot: int = 0,
    k_scale: _Scale | Sequence[_Scale] | None = None,
    v_scale: _Scale | Sequence[_Scale] | None = None,
    k_norm: torch.Tensor | Sequence[torch.Tensor] | None = None,
    k_norm_eps: float = 1e-6,
    k_norm_offset: float = 0.0,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Commit the valid rows of a round to the caches of all layers, in place.

    With c = `valid[b]` clamped to 0..R and c > 0, for request b: the row in `pending_slot[b]` is copied to
    `promote_dst[b]`; rows 0..c-2 go to `dst[b, 0..c-2]`; row c-1 goes to `pending_slot[b]`; rows c..R-1 go to
    `scratch_dst[b, c..]` when given; `next_hidden[b] = hidden[b, c - 1]`; `lengths[b] += c`. Without `pending_slot` row
    c-1 goes to `dst[b, c - 1]` like the others. With c = 0 or `live[b]` false nothing of request b changes.

    Args:
        rows_k, rows_v: lists, per layer `[B, R, Hkv, Dk]` and `[B, R, Hkv, Dv]`. They may be views of the same
            request's rows in the same cache (its scratch) where R <= 32: all reads of a request come before its writes.
            Another float dtype than the cache's is rounded to it.
        k_caches, v_caches: lists, per layer `[num_slots, Hkv, D]`, or `[num_pages, page_size, Hkv, D]` with slot =
            page * page_size + offset; of a float dtype, float8_e4m3fn or float8_e5m2. Mutated. Any strides with the
            last dimension contiguous, like every tensor here; `[B]` vectors may have any stride.
        valid: `[B]` int32/int64, rows of this round that are true (accepted plus correction or bonus).
        dst: `[B, R]` int32/int64 history slots.
        pending_slot, promote_dst: `[B]` int32/int64, given together. A request's first round has a pending row from its
            prefill, or -1 in `promote_dst`.
        scratch_dst: `[B, R]` int32/int64.
        hidden, next_hidden: `[B, R, H]` and `[B, H]`, one dtype, given together. `next_hidden` is mutated.
        lengths: `[B]` int32/int64, mutated. `advance_round` adds c to its `length` too: pass this only where that op is
            not called for the same tensor.
        live: `[B]` bool.
        first_slot: slots below it are never written nor promoted from (an engine's null slot or null page).
        k_scale, v_scale: float or fp32 `[]`, `[1]`, `[Hkv]` or `[B, Hkv]`, one for all layers or a list, one a layer; a
            cached value times its scale is the true one, as in `block_attention`. Needed by fp8 caches. Rows are
            divided by them, saturated to the format's largest number and rounded to nearest even; a NaN stays one.
        k_norm, k_norm_eps, k_norm_offset: weight `[Dk]`, one for all layers or one a layer, of an RMSNorm that K rows
            get over each head: `x / sqrt(mean(x^2) + eps) * (offset + k_norm)`.
        cos_sin, positions: `[M, rotary_dim]`, cosines in the first half of a row and sines in the second, and `[B, R]`
            int32/int64: K rows (after their norm) are rotated in their first `rotary_dim` elements, halves convention.
            What norm and rotation make is computed in fp32 and rounded once.

    A slot below `first_slot` (any negative one) skips that one copy. When two rows go to one slot the later one wins:
    all promoted rows come first, then the rows by request and row number. A pending slot that another request writes in
    the same call is not promoted.

    Returns:
        `[B]` int32 error bits: 1, `valid[b]` was outside 0..R; 2, a slot that request b uses is >= num_slots and its
        copy was skipped; 4, its pending row was not promoted because another request writes that slot; 8, the position
        of a row that is placed lies outside the table and was clamped. Slots and positions that the request does not
        use are never looked at. A dead request reports 0.

    Raises:
        ValueError, TypeError: a shape, dtype, stride or device is wrong; the message names the argument.

    Source: section 6.3 of the DMTP description; contract choices in README.md beside this file.
    """
    for name, layers in (("rows_k", rows_k), ("rows_v", rows_v), ("k_caches", k_caches), ("v_caches", v_caches)):
        check_list(name, layers, "one tensor per layer")
    return COMMIT_KV.call(
        list(rows_k),
        list(rows_v),
        list(k_caches),
        list(v_caches),
        valid,
        dst,
        pending_slot=pending_slot,
        promote_dst=promote_dst,
        scratch_dst=scratch_dst,
        hidden=hidden,
        next_hidden=next_hidden,
        lengths=lengths,
        live=live,
        first_slot=first_slot,
        k_scale=_scales("k_scale", k_scale, valid),
        v_scale=_scales("v_scale", v_scale, valid),
        k_norm=_weights(k_norm),
        k_norm_eps=k_norm_eps,
        k_norm_offset=k_norm_offset,
        cos_sin=cos_sin,
        positions=positions,
    )


@takes_packed()
def commit_round(
    rows_k: Sequence[torch.Tensor],
    rows_v: Sequence[torch.Tensor],
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    valid: torch.Tensor,
    dst: Sequence[torch.Tensor],
    *,
    layers: Sequence[int],
    pending_slot: torch.Tensor | None = None,
    promote_dst: torch.Tensor | None = None,
    scratch_dst: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    next_hidden: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    first_slot: int | Sequence[int] = 0,
    k_scale: _Scale | Sequence[_Scale | None] | None = None,
    v_scale: _Scale | Sequence[_Scale | None] | None = None,
) -> torch.Tensor:
    """Commit the valid rows of a round to several caches, in place and in one launch.

    Does `commit_kv` on each cache, bit for bit: rows 0..c-1 of request b go to `dst[cache][b]`. Pending slot, promotion
    and scratch are those of the last cache; the others get the true rows alone.

    Args:
        rows_k, rows_v, k_caches, v_caches: as in `commit_kv`, the layers of all caches one after another. Layers of one
            cache agree in shape and dtype; caches may differ in heads, dims, page size, slots, dtypes and strides. No
            two caches may share memory.
        valid: `[B]` int32/int64, rows that are true, the same in all caches.
        dst: list, per cache `[B, R]` int32/int64 slots of that cache.
        layers: how many of the layers belong to each cache.
        pending_slot, promote_dst, scratch_dst: slots of the last cache, as in `commit_kv`.
        hidden, next_hidden, lengths, live: as in `commit_kv`; `lengths` grows once.
        first_slot: one for all caches, or a list of one a cache.
        k_scale, v_scale: as in `commit_kv`, one for all caches, or a list of one a cache or one a layer, in which None
            (an empty tensor in the raw op) stands for a cache without.

    Returns:
        `[B]` int32 error bits, those of all caches together: see `commit_kv`.

    Raises:
        ValueError, TypeError: a shape, dtype, stride or device is wrong; the message names the argument, `rows_k[3]` or
            `dst[1]` in a list.

    Source: section 6.3 of the DMTP description; README.md beside this file.
    """
    for name, tensors in (("rows_k", rows_k), ("rows_v", rows_v), ("k_caches", k_caches), ("v_caches", v_caches)):
        check_list(name, tensors, "one tensor per layer")
    check_list("dst", dst, "one tensor per cache")
    check_list("layers", layers, "one whole number per cache")
    first_slots = list(first_slot) if isinstance(first_slot, Sequence) else [first_slot]
    for slot in first_slots:
        check_whole("first_slot", slot)
    return COMMIT_ROUND.call(
        list(rows_k),
        list(rows_v),
        list(k_caches),
        list(v_caches),
        valid,
        list(dst),
        layers=list(layers),
        pending_slot=pending_slot,
        promote_dst=promote_dst,
        scratch_dst=scratch_dst,
        hidden=hidden,
        next_hidden=next_hidden,
        lengths=lengths,
        live=live,
        first_slot=[int(slot) for slot in first_slots],
        k_scale=_round_scales("k_scale", k_scale, valid, len(layers)),
        v_scale=_round_scales("v_scale", v_scale, valid, len(layers)),
    )


def _round_scales(
    name: str, scales: _Scale | Sequence[_Scale | None] | None, valid: torch.Tensor, caches: int
) -> list[torch.Tensor] | None:
    if scales is None:
        return None
    device = _device_of(valid)
    if not isinstance(scales, Sequence):
        return [as_scale(name, scales, device)] * caches
    none = torch.empty(0, device=device)
    return [none if s is None else as_scale(f"{name}[{i}]", s, device) for i, s in enumerate(scales)]


def _device_of(valid: Any) -> torch.device | None:
    # what is no tensor is the op's to name
    return valid.device if isinstance(valid, torch.Tensor) else None


def _weights(weights: torch.Tensor | Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
    if weights is None or isinstance(weights, torch.Tensor):
        return None if weights is None else [weights]
    check_list("k_norm", weights, "one tensor per layer (or one tensor for all)")
    return list(weights)


def _scales(name: str, scales: _Scale | Sequence[_Scale] | None, valid: torch.Tensor) -> list[torch.Tensor] | None:
    if scales is None:
        return None
    device = _device_of(valid)
    if isinstance(scales, Sequence):
        return [as_scale(f"{name}[{layer}]", scale, device) for layer, scale in enumerate(scales)]
    return [as_scale(name, scales, device)]
