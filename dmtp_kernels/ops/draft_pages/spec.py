"""Inputs and traffic of the temporary page tables."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes
from dmtp_kernels.ops.draft_pages.op import draft_table_width


def _lengths(generator: torch.Generator, batch: int, limit: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-1, limit + 1, (batch,), generator=generator).to(dtype)


def _paged(
    batch: int, pages: int, window: int, page_size: int, block_slots: int, dtype: torch.dtype, skip: bool
) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages).to(dtype)
        ctx_len = _lengths(generator, batch, pages * page_size, dtype)
        valid_from = _lengths(generator, batch, pages * page_size, dtype) if skip else None
        return table, ctx_len, window, page_size, block_slots, None, valid_from

    return make


def _slots(
    batch: int, pages: int, window: int, page_size: int, block_slots: int, dtype: torch.dtype, pool: bool
) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        page = torch.randperm((batch + 1) * pages, generator=generator).view(batch + 1, pages, 1)
        slots = (page * page_size + torch.arange(page_size)).flatten(1).to(dtype)
        ctx_len = _lengths(generator, batch, pages * page_size, dtype)
        rows = torch.randperm(batch + 1, generator=generator)[:batch] if pool else None
        valid_from = None if pool else _lengths(generator, batch, page_size, dtype)
        return slots, ctx_len, window, page_size, rows, block_slots, None, valid_from

    return make


def _floor(batch: int, entries: int, width: int | None, *rows: Any) -> int:
    return nbytes(*rows) + batch * ((entries if width is None else width) * 4 + 8)


def _floor_paged(page_table: Any, ctx_len: Any, window: int, page_size: int, slots: int, width: Any, skip: Any) -> int:
    entries = min(draft_table_width(window, page_size, slots), page_table.shape[1])
    loads = page_table.shape[0] * entries * page_table.element_size()
    return loads + _floor(ctx_len.shape[0], entries, width, ctx_len, skip)


def _floor_slots(
    table: Any, ctx_len: Any, window: int, page_size: int, rows: Any, slots: int, width: Any, skip: Any
) -> int:
    entries = min(draft_table_width(window, page_size, slots), -(-table.shape[1] // page_size))
    loads = ctx_len.shape[0] * entries * table.element_size()
    return loads + _floor(ctx_len.shape[0], entries, width, ctx_len, rows, skip)


PAGED = Spec(
    op="draft_page_table",
    cases=(
        Case("round", "the source's window, block passed dense", _paged(8, 260, 4096, 16, 0, torch.int32, False)),
        Case("block_in_cache", "pages of the block follow the context", _paged(5, 9, 64, 16, 8, torch.int64, True)),
        Case("page_one", "token-granular pages", _paged(3, 40, 16, 1, 8, torch.int32, False)),
        Case("no_window", "window 0 keeps only the block", _paged(3, 4, 0, 16, 8, torch.int32, False)),
        Case("empty", "no live request", _paged(0, 4, 16, 4, 0, torch.int32, False)),
    ),
    floor_bytes=_floor_paged,
    flops=lambda *_: 0,
    exact=True,
)

FROM_SLOTS = Spec(
    op="draft_page_table_from_slots",
    cases=(
        Case("round", "SGLang's req_to_token, int32, pages of 64", _slots(8, 20, 512, 64, 8, torch.int32, True)),
        Case("page_one", "SGLang's default page size, int64 slots", _slots(3, 40, 16, 1, 0, torch.int64, False)),
        Case("empty", "no live request", _slots(0, 4, 16, 4, 0, torch.int32, True)),
    ),
    floor_bytes=_floor_slots,
    flops=lambda *_: 0,
    exact=True,
)

SPECS = (PAGED, FROM_SLOTS)

_KERNEL = "draft_page_table_kernel"
_SECTOR = 32  # bytes; nothing smaller comes from memory


def _full(batch: int, pages: int, window: int, page_size: int, *, slots: bool) -> Case:
    """Every request has its whole window, which starts in mid-page where pages have a middle."""
    make = _slots if slots else _paged
    name = f"{'slots' if slots else 'pages'}_b{batch}_p{page_size}"

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        made = list(make(batch, pages, window, page_size, 8, torch.int32, slots)(generator))
        made[1] = torch.full((batch,), (pages - 8) * page_size - page_size // 2, dtype=torch.int32)
        if slots:
            made[4] = torch.arange(batch, dtype=torch.int32)
        return tuple(made)

    return Case(name, f"window {window} of a history of {pages * page_size} rows, block in the cache", inputs)


def _pages_of(window: int, page_size: int) -> int:
    """Pages that the window and the block of `_full` touch."""
    return -(-(page_size // 2 + window + 8) // page_size)


def _moved(batch: int, loads: int, window: int, page_size: int) -> int:
    """`loads` bytes of a request's row, in whole sectors, and what else is read and written."""
    return batch * (-(-loads // _SECTOR) * _SECTOR + draft_table_width(window, page_size, 8) * 4 + 12)


def _traffic_pages(page_table: Any, ctx_len: Any, window: int, page_size: int, *_: Any) -> int:
    return _moved(ctx_len.shape[0], 4 * _pages_of(window, page_size), window, page_size)


def _traffic_slots(req_to_token: Any, ctx_len: Any, window: int, page_size: int, *_: Any) -> int:
    # one slot of a page is wanted: the sector it lies in, or less where a sector holds slots of several pages
    loads = min(_SECTOR, 4 * page_size) * _pages_of(window, page_size)
    return _moved(ctx_len.shape[0], loads, window, page_size) + 4 * ctx_len.shape[0]


TRAFFIC = (
    *(
        Traffic("draft_page_table", _full(32, 2048 // n, 4096, 16 * n, slots=False), {_KERNEL: _traffic_pages})
        for n in (1, 4)
    ),
    *(
        Traffic(
            "draft_page_table_from_slots", _full(32, 32768 // size, 4096, size, slots=True), {_KERNEL: _traffic_slots}
        )
        for size in (1, 16, 64)
    ),
)
