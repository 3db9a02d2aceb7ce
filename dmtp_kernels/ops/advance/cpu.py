"""The round's bookkeeping on the compiled CPU kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dmtp_kernels import backends


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
    library: Callable[[], Any] = backends.compiled,
) -> None:
    """As `reference.advance_round`."""
    moved = length, anchor, budget, finished, commit_len, bonus, ended
    library().advance_round(moved, page_tables, page_sizes, grants, mask_id, first_page, outputs)
