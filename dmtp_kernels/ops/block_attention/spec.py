"""Inputs and traffic of block attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, CudaTraffic, Spec, Traffic, nbytes


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


def _batch(
    heads: tuple[int, int],
    dim: int,
    lengths: tuple[int, ...],
    *,
    batch: int = 32,
    page_size: int = 64,
    table_rows: int,
    window: int | None = None,
    dense: int | None = None,
    fp8: bool = False,
) -> Any:
    """`batch` requests of 8 slots, of which the first have these histories and the others none."""

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)

        used = [-(-(n + 8) // page_size) for n in lengths] + [1] * (batch - len(lengths))
        order = torch.randperm(sum(used), generator=generator).to(torch.int32)
        table = torch.full((batch, -(-table_rows // page_size)), -1, dtype=torch.int32)
        for row, ids in zip(table, order.split(used), strict=True):
            row[: len(ids)] = ids
        caches = [normal(sum(used), page_size, heads[1], dim) for _ in range(2)]
        if fp8:
            caches = [c.to(torch.float8_e4m3fn) for c in caches]
        scales = (torch.tensor(0.5), torch.tensor(2.0)) if fp8 else (None, None)
        block = (None, None) if dense is None else (normal(batch, dense, heads[1], dim) for _ in range(2))
        ctx_len = torch.tensor([*lengths, *[0] * (batch - len(lengths))], dtype=torch.int32)
        q = normal(batch, 8, heads[0], dim)
        rest = (None, window, "anchor", window is None, None, None, *scales, None, None)
        return (q, *caches, table, ctx_len, *block, *rest)

    return make


def _split_floors(chunk: int) -> dict[str, Any]:
    """Of both launches, where a request of more than `chunk` rows has a partial sum for each `chunk` of them.

    The second launch writes the outputs of those requests; the partial sums are in its floor, not in the first one's.
    """

    def outputs(*args: Any) -> int:
        per_request = args[0][0]
        return int((args[4] > chunk).sum()) * (nbytes(per_request) + 4 * per_request[..., 0].numel())

    def attend(*args: Any) -> int:
        return _floor_bytes(*args) - outputs(*args)

    def combine(*args: Any) -> int:
        per_request = args[0][0]
        parts = sum(-(-n // chunk) for n in args[4].tolist() if n > chunk)
        # all that is read where no request has partial sums, in whole sectors
        lengths = -(-nbytes(args[4]) // 32) * 32
        return outputs(*args) + lengths + parts * 4 * (per_request.numel() + 2 * per_request[..., 0].numel())

    return {"block_attention_kernel": attend, "block_attention_combine_kernel": combine}


def _partials(chunk: int) -> Callable[..., dict[str, int]]:
    """Where the CUDA kernels keep partial sums, for as many chunks as a table has."""

    def sizes(*args: Any) -> dict[str, int]:
        q, k_cache, table = args[0], args[1], args[3]
        rows = q[..., 0].numel() * -(-table.shape[1] * k_cache.shape[1] // chunk)
        return {"sums": 4 * rows * q.shape[3], "totals": 4 * rows, "tops": 4 * rows}

    return sizes


def _traffic(
    name: str, why: str, make: Any, *, chunk: int | None = None, cuda_chunk: int | None = None, limit: float = 1.05
) -> Traffic:
    """`chunk`: context rows of a partial sum, `cuda_chunk` where the CUDA kernels' are others; None: there are none."""

    def floors(chunk: int | None) -> dict[str, Any]:
        return {"block_attention_kernel": _floor_bytes} if chunk is None else _split_floors(chunk)

    # the cache of many such histories is larger than any L2 cache; all other tensors have their full size
    full = (
        "q_ptr table_ptr ctx_ptr valid_ptr length_ptr block_k_ptr block_v_ptr k_scale_ptr v_scale_ptr sink_ptr out_ptr "
        "lse_ptr acc_ptr total_ptr top_ptr"
    )
    cuda_chunk = cuda_chunk or chunk
    scratch = None if cuda_chunk is None else _partials(cuda_chunk)
    cuda = CudaTraffic(floors(cuda_chunk), ("k_cache", "v_cache"), scratch)
    return Traffic("block_attention", Case(name, why, make), floors(chunk), 64.0, tuple(full.split()), limit, cuda)


TRAFFIC = (
    _traffic(
        "drafter_4_heads",
        "32 requests with a window of 4,096 and a dense block: one launch",
        _batch((32, 4), 128, (20_000, 4096), table_rows=20_480, window=4096, dense=8),
    ),
    _traffic(
        "drafter_8_heads",
        "pages of 16 rows, a window that starts in mid-page",
        _batch((32, 8), 128, (5001,), page_size=16, table_rows=8192, window=4096, dense=8),
    ),
    _traffic(
        "drafter_fp8",
        "half the bytes a row",
        _batch((32, 4), 128, (5001,), table_rows=8192, window=4096, dense=8, fp8=True),
    ),
    _traffic(
        "mtp_16k",
        "32 requests with long tables: partial sums of 4,096 rows each, written here and read by the second launch",
        _batch((16, 2), 256, (16_376,), table_rows=32_768),
        chunk=4096,
    ),
    _traffic(
        "mtp_fp8_16k",
        "half the bytes a row, partial sums of twice the rows",
        _batch((16, 2), 256, (16_376,), table_rows=32_768, fp8=True),
        chunk=8192,
    ),
    _traffic(
        "mtp_4k_alone",
        "one request: partial sums of 512 rows each, an eighth of its keys and values, to have programs for the "
        "device; CUDA's stay in a cluster",
        _batch((16, 2), 256, (4000,), batch=1, table_rows=8192),
        chunk=512,
        cuda_chunk=4096,
        limit=1.15,
    ),
)
