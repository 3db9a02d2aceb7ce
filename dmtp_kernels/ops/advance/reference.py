"""The round's bookkeeping in eager PyTorch: the definition every kernel must match."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels.ops.advance import BAD_COUNT, BAD_GRANT, NO_PAGE


def advance_round(
    length: torch.Tensor,  # [B] mutated
    anchor: torch.Tensor,  # [B] mutated
    budget: torch.Tensor,  # [B] mutated
    finished: torch.Tensor,  # [B] mutated
    commit_len: torch.Tensor,  # [B]
    bonus: torch.Tensor,  # [B]
    ended: torch.Tensor,  # [B]
    page_tables: Sequence[torch.Tensor],  # [B, MP] each, mutated
    page_sizes: Sequence[int],
    rows: int,
    grants: torch.Tensor | None,  # [B, G, 3] mutated
    block_slots: int,
    mask_id: int,
    first_page: int,
    positions: torch.Tensor,  # [B, R] out
    token_positions: torch.Tensor,  # [B, R] out
    context_len: torch.Tensor,  # [B] out
    history_len: torch.Tensor,  # [B] out
    slots: torch.Tensor,  # [B, T, R] out
    previous_slots: torch.Tensor,  # [B, T] out
    block_ids: torch.Tensor,  # [B, S] out
    error: torch.Tensor,  # [B] out
) -> None:
    left = budget.long()
    live = left > 0
    miscounted = live & ((commit_len < 0) | (commit_len > rows))
    count = commit_len.long().clamp(0, rows) * live
    moved = count > 0
    length.add_(count.to(length.dtype))
    anchor.copy_(torch.where(moved, bonus.to(anchor.dtype), anchor))
    finished.copy_(torch.where(moved, ended.to(finished.dtype), finished))
    left = torch.where(moved, (left - count).clamp(min=0) * (ended == 0), left)
    budget.copy_(left)
    flags = _grant(page_tables, grants, first_page) * BAD_GRANT

    live = left > 0
    row = torch.arange(rows, device=length.device)
    first = length.long() * live  # [B]
    positions.copy_(first[:, None] + row)
    token_positions.copy_(positions + 1)
    context_len.copy_(first)
    history_len.copy_((first - 1).clamp(min=0))
    if block_slots > 0:
        block_ids.fill_(mask_id)
        block_ids[:, 0] = torch.where(live, anchor.long(), mask_id)
    homeless = torch.zeros_like(live)
    for t, (table, size) in enumerate(zip(page_tables, page_sizes, strict=True)):
        around = torch.cat([first[:, None] - 1, positions], dim=1)  # [B, 1 + R]
        slot = torch.where(live[:, None], _slots(table, around, size, first_page), -1)
        previous_slots[:, t] = slot[:, 0]
        slots[:, t] = slot[:, 1:]
        homeless |= ((slot[:, 1:] < 0) & (row < left[:, None])).any(dim=1)
    error.copy_(flags + miscounted * BAD_COUNT * live + homeless * NO_PAGE * live)


def _grant(page_tables: Sequence[torch.Tensor], grants: torch.Tensor | None, first_page: int) -> torch.Tensor:
    """Enter the grants `[B, G, 3]` and mark them unused; `[B]` whether one was skipped."""
    if grants is None or grants.shape[1] == 0:
        return torch.zeros((), dtype=torch.int32, device=None if grants is None else grants.device)
    table, column, page = grants.long().unbind(dim=2)  # [B, G]
    inside = torch.zeros_like(table, dtype=torch.bool)
    order = torch.arange(table.shape[1], device=table.device)
    for t, entries in enumerate(page_tables):
        width = entries.shape[1]
        mine = (table == t) & (column >= 0) & (column < width) & (page >= first_page)
        inside |= mine
        same = (column[:, :, None] == column[:, None, :]) & mine[:, None, :]
        replaced = (same & (order > order[:, None])).any(dim=2)  # by a later grant
        # what does not count goes to a column that is not there
        wide = (
            torch.cat([entries, torch.zeros_like(entries[:, :1])], dim=1)
            if width
            else entries.new_zeros(len(entries), 1)
        )
        wide.scatter_(1, torch.where(mine & ~replaced, column, width), page.to(entries.dtype))
        entries.copy_(wide[:, :width])
    skipped = ((table >= 0) & ~inside).any(dim=1)
    grants[:, :, 0] = torch.where(table >= 0, -1, table).to(grants.dtype)
    return skipped


def _slots(table: torch.Tensor, positions: torch.Tensor, page_size: int, first_page: int) -> torch.Tensor:
    """`[B, n]` slots of `positions[B, n]`; -1 outside the table and where it is not mapped."""
    width = table.shape[1]
    if width == 0:
        return torch.full_like(positions, -1)
    column = positions.div(page_size, rounding_mode="floor")
    inside = (positions >= 0) & (column < width)
    page = table.gather(1, column.clamp(0, width - 1)).long()
    return torch.where(inside & (page >= first_page), page * page_size + positions % page_size, -1)
