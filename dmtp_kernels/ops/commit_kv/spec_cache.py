"""Inputs of a commit to one cache, and the bytes it must move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops._spec import nbytes


def cache_case(
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
    scaled: bool = False,
    turns: bool = False,
) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """`turns`: K rows are rotated by quarter turns, which is exact."""
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
        head: tuple[Any, ...] = (keys, values, caches_k, caches_v, count, dst)
        if not pending:
            return (*head, None, None, None, None, None, None, None, 0, None, None, None, 1e-6, 0.0, None, None)
        hidden = torch.randn(batch, rows, 24, generator=generator).to(dtype)
        next_hidden = torch.randn(batch, 24, generator=generator).to(dtype)
        lengths = torch.randint(0, 99, (batch,), generator=generator).to(index)
        live = torch.rand(batch, generator=generator) < 0.8
        pending_slot, promote_dst = slots[:, -1], slots[:, -2]
        head = (*head, pending_slot, promote_dst, scratch, hidden, next_hidden, lengths, live, 1)
        scales: tuple[Any, Any] = (None, None)
        if scaled:
            scales = [torch.rand(heads, generator=generator) + 0.5], [torch.tensor(0.25) for _ in range(layers)]
        table = positions = None
        if turns:
            quarter = torch.randint(0, 4, (50, dims[0] // 4), generator=generator)
            table = torch.cat((torch.tensor([1.0, 0, -1, 0])[quarter], torch.tensor([0, 1.0, 0, -1])[quarter]), dim=1)
            positions = torch.randint(-1, 51, (batch, rows), generator=generator).to(index)
        return (*head, *scales, None, 1e-6, 0.0, table, positions)

    return make


def _moved(*inputs: Any) -> tuple[int, int]:
    """Rows placed and rows promoted, where slots are used once and all lie in the cache."""
    valid, dst, pending, _, scratch, live = inputs[4], *inputs[5:9], inputs[12]
    count = valid.long().clamp(0, dst.shape[1]) * (1 if live is None else live.long())
    active = count > 0
    placed = active.long() * dst.shape[1] if scratch is not None else count
    return int(placed.sum()), int(active.sum()) if pending is not None else 0


def floor_bytes(*inputs: Any) -> int:
    rows, caches = [*inputs[0], *inputs[1]], [*inputs[2], *inputs[3]]
    valid, dst, pending, promote, live = inputs[4], inputs[5], inputs[6], inputs[7], inputs[12]
    next_hidden, lengths, cos_sin, positions = inputs[10], inputs[11], inputs[19], inputs[20]
    placed, promoted = _moved(*inputs)
    total = 0
    for row, cache in zip(rows, caches, strict=True):
        size = row[0, 0].numel() if len(row) else 0
        total += size * (placed * (row.element_size() + cache.element_size()) + 2 * promoted * cache.element_size())
    total += nbytes(valid, pending, promote, live) + placed * dst.element_size() + 4 * len(valid)
    if cos_sin is not None:
        total += placed * positions.element_size() + nbytes(cos_sin)
    for small in inputs[14:17]:
        total += nbytes(*(small or ()))
    active = int((valid > 0).sum()) if live is None else int(((valid > 0) & live).sum())
    per_request = sum(2 * t[0].numel() * t.element_size() for t in (next_hidden, lengths) if t is not None and len(t))
    return total + active * per_request


def full_case(
    batch: int, heads: int, dim: int, layers: int, *, fp8: torch.dtype | None = None, rounds: bool = True
) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """Rounds of eight rows with bf16 rows; `rounds`: with pending slot, scratch and a hidden of 2,048 elements."""
    slots = 18 * batch + 16

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        rows = [
            [torch.randn(batch, 8, heads, dim, generator=generator).to(torch.bfloat16) for _ in range(layers)]
            for _ in range(2)
        ]
        caches = [
            [torch.zeros(-(-slots // 16), 16, heads, dim, dtype=fp8 or torch.bfloat16) for _ in range(layers)]
            for _ in range(2)
        ]
        used = torch.randperm(18 * batch, generator=generator).view(batch, 18)
        count = torch.randint(1, 9, (batch,), generator=generator)
        scales = ([torch.tensor(0.5)] * layers,) * 2 if fp8 else (None, None)
        rest: tuple[Any, ...] = (None,) * 6
        if rounds:
            hidden = torch.randn(batch, 8, 2048, generator=generator).to(torch.bfloat16)
            rest = (used[:, 16].clone(), used[:, 17].clone(), used[:, 8:16].clone(), hidden, hidden[:, 0].clone())
            rest = (*rest, torch.zeros(batch, dtype=torch.int64))
        head = (*rows, *caches, count, used[:, :8].clone(), *rest, None, 0)
        return (*head, *scales, None, 1e-6, 0.0, None, None)

    return make
