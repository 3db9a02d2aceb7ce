"""Launch of the Triton kernel of the round's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from dmtp_kernels.ops.advance import kernels
from dmtp_kernels.ops.advance.config import advance_config
from dmtp_kernels.ops.advance.op import MAX_TABLES


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
    *outputs: torch.Tensor,
) -> None:
    batch = length.shape[0]
    if batch == 0:
        return
    given = 0 if grants is None else grants.shape[1]
    config = advance_config(rows, given, block_slots)
    state = [value for t in (length, anchor, budget, finished, commit_len, bonus, ended) for value in (t, t.stride(0))]
    tables: list[object] = []
    for t in range(MAX_TABLES):
        table = page_tables[t] if t < len(page_tables) else None
        tables += (None, 1, 1) if table is None else (table, table.stride(0), table.shape[1])
    if grants is None or given == 0:
        granted: tuple[object, ...] = None, 1, 1, 0
    else:
        granted = grants, grants.stride(0), grants.stride(1), given
    sizes = [*page_sizes, 1, 1, 1]
    buffers = [value for t in outputs for value in (t, *t.stride())]
    # Triton launches on the current device
    with torch.cuda.device(length.device) if length.device.type == "cuda" else nullcontext():
        kernels.advance_round_kernel[(batch,)](
            *state, *tables, *granted, rows, block_slots, mask_id, first_page, *buffers,
            PAGE0=sizes[0], PAGE1=sizes[1], PAGE2=sizes[2], TABLES=len(page_tables), GRANTS=config.grants,
            LANES=config.lanes, SLOTS=config.block, num_warps=config.warps,
        )  # fmt: skip
