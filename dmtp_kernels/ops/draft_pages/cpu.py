"""The temporary page tables on the compiled CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels import backends


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
    library: Callable[[], Any] = backends.compiled,
) -> None:
    """As `reference.draft_page_table`."""
    outputs = draft_table, draft_len, kv_skip
    library().draft_pages(page_table, None, ctx_len, valid_from, window, page_size, block_slots, False, *outputs)


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
    library: Callable[[], Any] = backends.compiled,
) -> None:
    """As `reference.draft_page_table_from_slots`."""
    outputs = draft_table, draft_len, kv_skip
    library().draft_pages(
        req_to_token, req_pool_indices, ctx_len, valid_from, window, page_size, block_slots, True, *outputs
    )
