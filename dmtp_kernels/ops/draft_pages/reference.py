"""Temporary page tables in eager PyTorch: the definition every kernel must match."""

from __future__ import annotations

import torch

_INT32_MAX = 2**31 - 1


def draft_page_table(
    page_table: torch.Tensor,  # [B, MP]
    ctx_len: torch.Tensor,  # [B]
    window: int,
    page_size: int,
    block_slots: int,
    width: int | None,
    valid_from: torch.Tensor | None,  # [B]
    draft_table: torch.Tensor,  # [B, width] out
    draft_len: torch.Tensor,  # [B] out
    kv_skip: torch.Tensor,  # [B] out
) -> None:
    capacity = page_table.shape[1] * page_size
    live = ctx_len > 0
    used, column = _plan(
        ctx_len, live, capacity, window, page_size, block_slots, valid_from, draft_table, draft_len, kv_skip
    )
    if page_table.shape[1] == 0:
        draft_table.zero_()
        return
    page = page_table.gather(1, column.clamp(0, page_table.shape[1] - 1)).long()
    draft_table.copy_(_page_ids(page, used))


def draft_page_table_from_slots(
    req_to_token: torch.Tensor,  # [R, max_len]
    ctx_len: torch.Tensor,  # [B]
    window: int,
    page_size: int,
    req_pool_indices: torch.Tensor | None,  # [B]
    block_slots: int,
    width: int | None,
    valid_from: torch.Tensor | None,  # [B]
    draft_table: torch.Tensor,  # [B, width] out
    draft_len: torch.Tensor,  # [B] out
    kv_skip: torch.Tensor,  # [B] out
) -> None:
    rows, max_len = req_to_token.shape
    row = torch.arange(ctx_len.shape[0], device=ctx_len.device) if req_pool_indices is None else req_pool_indices.long()
    live = (ctx_len > 0) & (row >= 0) & (row < rows)
    used, column = _plan(
        ctx_len, live, max_len, window, page_size, block_slots, valid_from, draft_table, draft_len, kv_skip
    )
    if rows == 0 or max_len == 0:
        draft_table.zero_()
        return
    position = (column * page_size).clamp(0, max_len - 1)
    slot = req_to_token[row.clamp(0, rows - 1)[:, None], position].long()
    draft_table.copy_(_page_ids(slot.div(page_size, rounding_mode="floor"), used))


def _plan(
    ctx_len: torch.Tensor,  # [B]
    live: torch.Tensor,  # [B]
    capacity: int,
    window: int,
    page_size: int,
    block_slots: int,
    valid_from: torch.Tensor | None,  # [B]
    draft_table: torch.Tensor,  # [B, width]
    draft_len: torch.Tensor,  # [B] out
    kv_skip: torch.Tensor,  # [B] out
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the lengths; return which columns are used and the page number each one takes, both `[B, width]`."""
    ctx = ctx_len.long()
    fits = ctx <= capacity - block_slots
    refused = live & ~fits
    ctx = torch.where(live & fits, ctx, 0)
    start = (ctx - window).clamp(min=0)
    if valid_from is not None:
        start = torch.maximum(start, valid_from.long())
    start = torch.minimum(start, ctx)
    first = start // page_size
    length = ctx - first * page_size
    column = torch.arange(draft_table.shape[1], device=ctx.device)
    used = (column * page_size < (length + block_slots)[:, None]) & (live & fits)[:, None]
    draft_len.copy_(torch.where(refused, -1, length))
    kv_skip.copy_(torch.where(refused, -1, start % page_size))
    return used, first[:, None] + column


def _page_ids(page: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return torch.where(used & (page >= 0) & (page <= _INT32_MAX), page, 0)
