"""Inputs and traffic of the commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, nbytes


def _case(
    batch: int,
    *,
    rows: int = 8,
    heads: int = 2,
    dims: tuple[int, int] = (16, 16),
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    pending: bool = True,
    page_size: int = 0,
    packed: bool = False,
) -> Callable[[torch.Generator], tuple[Any, ...]]:
    per_request = 2 * rows + 2
    num_slots = 4 * ((batch * per_request + 3) // 4) + 4

    def cache(dim: int, generator: torch.Generator) -> torch.Tensor:
        shape = (num_slots // page_size, page_size) if page_size else (num_slots,)
        if not packed:
            return torch.randn(*shape, heads, dim, generator=generator).to(dtype)
        # K and V of one page interleaved, heads outside tokens: only the last dimension is contiguous
        whole = torch.randn(shape[0], heads, *shape[1:], 2 * dim, generator=generator).to(dtype)
        return (whole.transpose(1, 2) if page_size else whole)[..., :dim]

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        slots = torch.randperm(num_slots, generator=generator)[: batch * per_request].view(batch, per_request).to(index)
        keys, values = [
            [torch.randn(batch, rows, heads, dim, generator=generator).to(dtype) for _ in range(layers)] for dim in dims
        ]
        caches_k, caches_v = [[cache(dim, generator) for _ in range(layers)] for dim in dims]
        count = torch.randint(-1, rows + 2, (batch,), generator=generator).to(index)
        dst, scratch = slots[:, :rows], slots[:, rows : 2 * rows]
        head = (keys, values, caches_k, caches_v, count, dst)
        if not pending:
            return (*head, None, None, None, None, None, None, None, 0)
        hidden = torch.randn(batch, rows, 24, generator=generator).to(dtype)
        next_hidden = torch.randn(batch, 24, generator=generator).to(dtype)
        lengths = torch.randint(0, 99, (batch,), generator=generator).to(index)
        live = torch.rand(batch, generator=generator) < 0.8
        pending_slot, promote_dst = slots[:, -1], slots[:, -2]
        return (*head, pending_slot, promote_dst, scratch, hidden, next_hidden, lengths, live, 1)

    return make


def _copied_rows(valid: torch.Tensor, width: int, pending: bool, scratch: bool, live: torch.Tensor | None) -> int:
    counts = valid.long().clamp(0, width) * (1 if live is None else live.long())
    written = torch.where(counts > 0, torch.full_like(counts, width), 0) if scratch else counts
    return int((written + (counts > 0).long() * int(pending)).sum())


def _floor_bytes(
    rows_k: list[torch.Tensor],
    rows_v: list[torch.Tensor],
    k_caches: list[torch.Tensor],
    v_caches: list[torch.Tensor],
    valid: torch.Tensor,
    dst: torch.Tensor,
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
    first_slot: int,
) -> int:
    copied = _copied_rows(valid, dst.shape[1], pending_slot is not None, scratch_dst is not None, live)
    per_row = sum(
        cache[(0,) * (cache.dim() - 2)].numel() * (row.element_size() + cache.element_size())
        for row, cache in zip([*rows_k, *rows_v], [*k_caches, *v_caches], strict=True)
    )
    indices = nbytes(valid, pending_slot, promote_dst, live) + copied * dst.element_size() + valid.shape[0] * 4
    return copied * per_row + indices + 2 * nbytes(next_hidden, lengths)


COMMIT = Spec(
    op="commit_kv",
    cases=(
        Case("round", "the DMTP round: eight rows, one MTP layer, pending and scratch", _case(4)),
        Case(
            "layers",
            "several layers, K wider than V, bf16, int32",
            _case(3, layers=3, dims=(24, 16), dtype=torch.bfloat16, index=torch.int32),
        ),
        Case("shifted", "engines that shift MTP by one: no pending slot, no scratch", _case(5, pending=False)),
        Case(
            "paged", "paged K and V packed in one allocation, heads outside tokens", _case(3, page_size=4, packed=True)
        ),
        Case("strided", "K and V halves of one row", _case(3, rows=5, heads=3, dims=(10, 10), packed=True)),
        Case("autoregressive", "one row per request", _case(7, rows=1)),
        Case("empty", "no request", _case(0)),
    ),
    floor_bytes=_floor_bytes,
    flops=lambda *_: 0,
    exact=True,
)

SPECS = (COMMIT,)
