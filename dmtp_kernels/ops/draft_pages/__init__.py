"""Temporary page tables that express the drafter's window without moving any KV."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmtp_kernels.ops.draft_pages.op import DRAFT_PAGE_TABLE, DRAFT_PAGE_TABLE_FROM_SLOTS, draft_table_width

__all__ = ["DraftPages", "draft_page_table", "draft_page_table_from_slots", "draft_table_width"]


class DraftPages(NamedTuple):
    """A temporary page table: pass its fields to `block_attention` as `page_table`, `ctx_len` and `valid_from`."""

    draft_table: torch.Tensor  # [B, width] int32
    draft_len: torch.Tensor  # [B] int32
    kv_skip: torch.Tensor  # [B] int32


def draft_page_table(
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    *,
    window: int,
    page_size: int,
    block_slots: int = 0,
    width: int | None = None,
    valid_from: torch.Tensor | None = None,
) -> DraftPages:
    """Page table of the rows `start .. ctx_len - 1`, `start = min(ctx_len, max(ctx_len - window, valid_from, 0))`.

    Args:
        page_table: `[B, MP]` int32/int64; row p of a request lies at page `page_table[b, p // page_size]`.
        ctx_len: `[B]` int32/int64, context rows strictly before block row 0. A row with `ctx_len <= 0` is inert.
        window: context rows that stay visible, at least 0.
        page_size: rows per page.
        block_slots: block rows that follow the context in the cache (0: the block's KV is passed dense).
        width: columns of the result, default `min(draft_table_width(window, page_size, block_slots), MP)`, which is
            also the least.
        valid_from: `[B]` int32/int64, first context row ever written.

    Returns:
        `DraftPages(draft_table, draft_len, kv_skip)`. Column 0 is the page that holds `start`; the pages of the context
        and of `block_slots` rows after it follow; unused columns are 0, and so is an id below 0 or above 2^31 - 1.
        `draft_len = ctx_len - (start // page_size) * page_size` is the context length in the new table's rows;
        `kv_skip = start % page_size` of those rows come before the window and must be skipped. Inert rows are all 0.
        A row whose `ctx_len + block_slots` exceeds `MP * page_size` is refused: a table of zeros, `draft_len` and
        `kv_skip` -1, and `block_attention` answers 0 for it.

    Raises:
        ValueError, TypeError: a shape, dtype, device or size is wrong, or `width` too small; the message names the
            argument.

    Source: section 6.2 of the DMTP description; the exact left skip is this library's (README.md beside this file).
    """
    return DraftPages(
        *DRAFT_PAGE_TABLE.call(
            page_table,
            ctx_len,
            window=window,
            page_size=page_size,
            block_slots=block_slots,
            width=width,
            valid_from=valid_from,
        )
    )


def draft_page_table_from_slots(
    req_to_token: torch.Tensor,
    ctx_len: torch.Tensor,
    *,
    window: int,
    page_size: int,
    req_pool_indices: torch.Tensor | None = None,
    block_slots: int = 0,
    width: int | None = None,
    valid_from: torch.Tensor | None = None,
) -> DraftPages:
    """`draft_page_table` from a token-slot table: page j of a row is `req_to_token[row, j * page_size] // page_size`.

    Args:
        req_to_token: `[R, max_len]` int32/int64, position -> KV slot; the slots of a page are consecutive and aligned.
            `max_len` need not be a multiple of `page_size`.
        req_pool_indices: `[B]` int32/int64, row of each request (default: 0..B-1, then R must be at least B). An
            index outside `[0, R)` makes the row inert.

    The other arguments, the result and the errors are those of `draft_page_table`, with
    `MP = ceil(max_len / page_size)`; a row is refused when `ctx_len + block_slots` exceeds `max_len`.
    """
    return DraftPages(
        *DRAFT_PAGE_TABLE_FROM_SLOTS.call(
            req_to_token,
            ctx_len,
            window=window,
            page_size=page_size,
            req_pool_indices=req_pool_indices,
            block_slots=block_slots,
            width=width,
            valid_from=valid_from,
        )
    )
