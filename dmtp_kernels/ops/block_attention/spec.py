"""Inputs and traffic of block attention."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, nbytes


def _case(
    batch: int,
    slots: int,
    heads: tuple[int, int],
    dim: int,
    pages: int,
    page_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    dense: int | None = None,
    window: int | None = None,
    window_ref: str = "anchor",
    causal: bool = False,
    packed: bool = False,
    extras: bool = False,
) -> Any:
    """`dense`: rows of a dense block (None: in the cache); `packed`: K and V as halves of one `[..., 2 * D]` buffer."""

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        q_heads, kv_heads = heads
        total = max(batch * pages, 1)
        if packed:
            k_cache, v_cache = normal(total, kv_heads, page_size, 2 * dim).to(dtype).transpose(1, 2).split(dim, dim=-1)
        else:
            k_cache, v_cache = (normal(total, page_size, kv_heads, dim).to(dtype) for _ in range(2))
        table = torch.randperm(total, generator=generator)[: batch * pages].view(batch, pages).to(torch.int32)
        ctx_len = torch.randint(0, pages * page_size - slots + 1, (batch,), generator=generator).to(torch.int32)
        block_k, block_v = (
            (None, None) if dense is None else (normal(batch, dense, kv_heads, dim).to(dtype) for _ in range(2))
        )
        return (
            normal(batch, slots, q_heads, dim).to(dtype),
            k_cache,
            v_cache,
            table,
            ctx_len,
            block_k,
            block_v,
            torch.randint(0, slots + 1, (batch,), generator=generator) if extras else None,
            window,
            window_ref,
            causal,
            torch.randint(0, page_size, (batch,), generator=generator) if extras else None,
            None,
            torch.rand(kv_heads, generator=generator) + 0.5 if extras else None,
            torch.tensor(0.5) if extras else None,
            5.0 if extras else None,
            normal(q_heads) if extras else None,
        )

    return make


def _shape(args: tuple[Any, ...]) -> tuple[int, int]:
    q, block_k = args[0], args[5]
    return q.shape[1], q.shape[1] if block_k is None else block_k.shape[1]


def _context_rows(args: tuple[Any, ...]) -> int:
    """Context rows a perfect kernel reads, over the batch; lengths and options are data here, not shapes."""
    ctx_len, window, window_ref, valid_from = args[4].long(), args[8], args[9], args[11]
    low = torch.zeros_like(ctx_len) if valid_from is None else valid_from.long().clamp(min=0)
    if window is not None:
        slots, rows = _shape(args)
        low = torch.maximum(low, ctx_len - window + (rows - slots + 1 if window_ref == "query" else 0))
    return int((ctx_len - low).clamp(min=0).sum())


def _floor_bytes(*args: Any) -> int:
    q, k_cache, v_cache, page_table, ctx_len, block_k, block_v, block_len = args[:8]
    rows = _context_rows(args) + (q.shape[0] * q.shape[1] if block_k is None else 0)
    per_row = k_cache.shape[2] * k_cache.shape[3] * (k_cache.element_size() + v_cache.element_size())
    entries = -(-rows // k_cache.shape[1]) * page_table.element_size()
    outputs = nbytes(q) + q.numel() // q.shape[3] * (8 if q.dtype == torch.float64 else 4)
    return rows * per_row + entries + outputs + nbytes(q, ctx_len, block_k, block_v, block_len, args[11], args[16])


def _flops(*args: Any) -> int:
    q = args[0]
    _, rows = _shape(args)
    return 4 * q.shape[1] * q.shape[2] * q.shape[3] * (_context_rows(args) + q.shape[0] * rows)


SPEC = Spec(
    op="block_attention",
    cases=(
        Case(
            "drafter",
            "window of the anchor, full visibility in a dense block",
            _case(3, 8, (6, 2), 32, 7, 16, dense=8, window=40),
        ),
        Case(
            "mtp",
            "causal over the whole history, pending row before eight rows",
            _case(3, 8, (4, 1), 48, 7, 16, dense=9, causal=True),
        ),
        Case(
            "block_in_cache", "the block's rows are already in the pages", _case(2, 8, (4, 4), 32, 6, 16, causal=True)
        ),
        Case(
            "query_window",
            "flash-attention's window, K and V packed as vLLM does",
            _case(3, 5, (3, 1), 24, 9, 4, window=9, window_ref="query", packed=True),
        ),
        Case(
            "extras",
            "block_len, valid_from, scales, soft cap and sink",
            _case(4, 8, (24, 1), 17, 3, 16, dense=8, extras=True),
        ),
        Case(
            "bf16",
            "a drafter's dtype and head dimension",
            _case(2, 8, (5, 1), 64, 4, 16, dtype=torch.bfloat16, dense=8),
        ),
        Case("decode", "one query, page of one row", _case(2, 1, (2, 2), 8, 20, 1)),
        Case("empty", "no live request", _case(0, 8, (2, 1), 16, 2, 16, dense=8)),
    ),
    floor_bytes=_floor_bytes,
    flops=_flops,
    exact=False,
)

SPECS = (SPEC,)
