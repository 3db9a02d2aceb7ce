"""Launch of the Triton kernel of the temporary page tables."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from dmtp_kernels.ops.draft_pages import kernels
from dmtp_kernels.ops.draft_pages.config import table_config


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
    outputs = draft_table, draft_len, kv_skip
    _launch(page_table, None, ctx_len, valid_from, capacity, window, page_size, block_slots, False, *outputs)


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
    capacity, pool = req_to_token.shape[1], req_pool_indices
    outputs = draft_table, draft_len, kv_skip
    _launch(req_to_token, pool, ctx_len, valid_from, capacity, window, page_size, block_slots, True, *outputs)


def _launch(
    source: torch.Tensor,  # [R, M]
    pool: torch.Tensor | None,  # [B]
    ctx_len: torch.Tensor,  # [B]
    valid_from: torch.Tensor | None,  # [B]
    capacity: int,
    window: int,
    page_size: int,
    block_slots: int,
    slots: bool,
    draft_table: torch.Tensor,  # [B, width] out
    draft_len: torch.Tensor,  # [B] out
    kv_skip: torch.Tensor,  # [B] out
) -> None:
    batch, width = draft_table.shape
    if batch == 0:
        return
    config = table_config(source.device)
    # a table without columns still has lengths
    tiles = max(1, -(-width // config.columns))
    # Triton launches on the current device
    with torch.cuda.device(source.device) if source.device.type == "cuda" else nullcontext():
        kernels.draft_page_table_kernel[(batch * tiles,)](
            source, source.stride(0), source.shape[0], pool, ctx_len, valid_from, capacity, window, block_slots,
            draft_table, draft_table.stride(0), draft_table.stride(1), width,
            draft_len, draft_len.stride(0), kv_skip, kv_skip.stride(0), tiles,
            PAGE_SIZE=page_size, SLOTS=slots, COLUMNS=config.columns, num_warps=config.warps,
        )  # fmt: skip
