"""Schema, argument checks and dispatch of the round's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import INDEX_DTYPES, check_range, check_same_device, check_tensor

MAX_TABLES = 3
_MOST = 2**31 - 1
_MOST_ROWS = 256  # a program holds its request's rows at once


def _check(
    length: torch.Tensor,
    anchor: torch.Tensor,
    budget: torch.Tensor,
    finished: torch.Tensor,
    commit_len: torch.Tensor,
    bonus: torch.Tensor,
    ended: torch.Tensor,
    page_tables: Sequence[torch.Tensor],
    page_sizes: Sequence[int],
    rows: int,
    grants: torch.Tensor | None,
    block_slots: int,
    mask_id: int,
    first_page: int,
) -> None:
    sizes: dict[str, int] = {}
    vectors = {
        "length": length,
        "anchor": anchor,
        "budget": budget,
        "finished": finished,
        "commit_len": commit_len,
        "bonus": bonus,
        "ended": ended,
    }
    for name, tensor in vectors.items():
        # one number per request may be a column of an engine's table
        check_tensor(name, tensor, ["B"], INDEX_DTYPES, sizes, last_contiguous=False)
    if len(page_tables) > MAX_TABLES:
        raise ValueError(f"page_tables: has {len(page_tables)} tables, must have at most {MAX_TABLES}")
    if len(page_sizes) != len(page_tables):
        raise ValueError(f"page_sizes: has {len(page_sizes)} entries, must have {len(page_tables)} like page_tables")
    tables = {f"page_tables[{t}]": table for t, table in enumerate(page_tables)}
    for t, (name, table) in enumerate(tables.items()):
        check_tensor(name, table, ["B", None], INDEX_DTYPES, sizes)
        check_range(f"page_sizes[{t}]", page_sizes[t], 1, _MOST)
    if grants is not None:
        check_tensor("grants", grants, ["B", "G", 3], [torch.int32], sizes)
        check_range("grants: dimension 1", sizes["G"], 0, _MOST_ROWS)
    check_range("rows", rows, 1, _MOST_ROWS)
    check_range("block_slots", block_slots, 0, _MOST_ROWS)
    check_range("mask_id", mask_id, 0, _MOST)
    check_range("first_page", first_page, 0, _MOST)
    check_same_device("length", length.device, **vectors, **tables, grants=grants)


def _shapes(length: torch.Tensor, *others: Any) -> list[Shape]:
    batch, tables, rows, block_slots = length.shape[0], len(others[6]), others[8], others[10]
    index = torch.int64
    return [
        ((batch, rows), index),
        ((batch, rows), index),
        ((batch,), index),
        ((batch,), index),
        ((batch, tables, rows), index),
        ((batch, tables), index),
        ((batch, block_slots), index),
        ((batch,), torch.int32),
    ]


ADVANCE_ROUND = define_op(
    "advance_round",
    args=(
        "Tensor(p!) length, Tensor(q!) anchor, Tensor(r!) budget, Tensor(s!) finished, Tensor commit_len, "
        "Tensor bonus, Tensor ended, Tensor(t!)[] page_tables, *, int[] page_sizes, int rows, "
        "Tensor(u!)? grants=None, int block_slots=0, int mask_id=0, int first_page=0"
    ),
    outs=(
        "positions", "token_positions", "context_len", "history_len", "slots", "previous_slots", "block_ids", "error",
    ),
    shapes=_shapes,
    check=_check,
    implementations={
        "triton": "dmtp_kernels.ops.advance.launch:advance_round",
        "cuda": "dmtp_kernels.ops.advance.cuda:advance_round",
        "cpu": "dmtp_kernels.ops.advance.cpu:advance_round",
        "reference": "dmtp_kernels.ops.advance.reference:advance_round",
    },
)  # fmt: skip
