"""What is left of a round after acceptance and commit, in one launch: lengths, budgets, page tables, next indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dmtp_kernels.ops._checks import check_list
from dmtp_kernels.ops.advance.op import ADVANCE_ROUND, MAX_TABLES

__all__ = ["BAD_COUNT", "BAD_GRANT", "MAX_TABLES", "NO_PAGE", "RoundIndex", "advance_round"]

BAD_COUNT, BAD_GRANT, NO_PAGE = 1, 2, 4
"""Bits of `RoundIndex.error`."""


class RoundIndex(NamedTuple):
    """Where the next round of every request reads and writes; all int64 but `error`. T page tables, R rows, S slots."""

    positions: torch.Tensor  # [B, R]
    token_positions: torch.Tensor  # [B, R]
    context_len: torch.Tensor  # [B]
    history_len: torch.Tensor  # [B]
    slots: torch.Tensor  # [B, T, R]
    previous_slots: torch.Tensor  # [B, T]
    block_ids: torch.Tensor  # [B, S]
    error: torch.Tensor  # [B] int32


def advance_round(
    length: torch.Tensor,
    anchor: torch.Tensor,
    budget: torch.Tensor,
    finished: torch.Tensor,
    commit_len: torch.Tensor,
    bonus: torch.Tensor,
    ended: torch.Tensor,
    page_tables: Sequence[torch.Tensor] = (),
    *,
    page_sizes: Sequence[int] = (),
    rows: int,
    grants: torch.Tensor | None = None,
    block_slots: int = 0,
    mask_id: int = 0,
    first_page: int = 0,
) -> RoundIndex:
    """Move every request past its committed tokens, in place, and index its next round.

    With c = `commit_len[b]` clamped to 0..R and `budget[b]` > 0: where c > 0, `length += c`, `anchor = bonus`,
    `finished = ended` and `budget = max(budget - c, 0)`, 0 if `ended` is not 0; where c = 0 nothing changes. Then the
    request's grants enter its page tables. A row whose budget is 0 or below, before or after, is inert from there on.

    Args:
        length: `[B]` a: rows in the caches and position of the anchor. Mutated, like the next three. It grows here: the
            same tensor must not be passed to `commit_kv` as `lengths`, which adds c too.
        anchor: `[B]` newest emitted token, not yet processed.
        budget: `[B]` tokens the request may still emit.
        finished: `[B]` why a request ended, 0 while it runs.
        commit_len, bonus, ended: `[B]`, as `accept_prefix` returns them (`ended` is its `finished`). With `commit_len`
            0 the call only indexes: use it after a request joined or moved.
        page_tables: up to three `[B, MP]` tables of caches that hold the same positions (target, drafter, MTP). Mutated
            where there are grants.
        page_sizes: list of ints, rows per page of each table.
        rows: R, rows of a round.
        grants: `[B, G, 3]` int32: (table, column, page) a request was given; table < 0 is unused. Mutated: what was
            read becomes unused. Of two grants of one entry the later one counts. A table that is not there, a column
            outside it and a page below `first_page` are skipped and flagged.
        block_slots: S, slots of a block of known ids; 0: none.
        mask_id: id of the slots after the first.
        first_page: entries below it are not mapped (an engine's null page).

    All `[B]` tensors and the tables are int32/int64 of any strides (a table's last dimension contiguous).

    Returns:
        `RoundIndex` of the moved state, with a the new length:

        - `positions[b, j]` = a + j and `token_positions[b, j]` = a + j + 1, where the token after row j goes;
        - `context_len` = a, `history_len` = max(a - 1, 0);
        - `slots[b, t, j]`: slot of position a + j in table t, page * page_size + offset; `previous_slots[b, t]` that of
          a - 1. -1 where the position is outside the table or its entry is not mapped;
        - `block_ids` = `[A, MASK, ...]`;
        - `error` bits: 1, `commit_len` was outside 0..R; 2, a grant was skipped; 4, one of the rows the request can
          still commit in the next round (min(R, budget) of them) has no page in some table.

        An inert row has positions 0.., lengths 0, slots -1, MASK ids, and reports skipped grants alone.

    Raises:
        ValueError, TypeError: a shape, dtype, stride, device or size is wrong; the message names the argument.

    Source: sections 4 and 6.4 of the DMTP description; contract choices in README.md beside this file.
    """
    check_list("page_tables", page_tables, "one [B, MP] tensor per cache")
    check_list("page_sizes", page_sizes, "one whole number per table")
    return RoundIndex(
        *ADVANCE_ROUND.call(
            length, anchor, budget, finished, commit_len, bonus, ended, list(page_tables), page_sizes=list(page_sizes),
            rows=rows, grants=grants, block_slots=block_slots, mask_id=mask_id, first_page=first_page,
        )
    )  # fmt: skip
