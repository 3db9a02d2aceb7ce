"""Inputs and traffic of the round's bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes


def _case(
    batch: int,
    *,
    sizes: tuple[int, ...] = (16, 16, 16),
    rows: int = 8,
    grants: int = 0,
    block_slots: int = 0,
    pages: int = 12,
    index: torch.dtype = torch.int64,
    first_page: int = 1,
) -> Callable[[torch.Generator], tuple[Any, ...]]:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        def vector(low: int, high: int, dtype: torch.dtype = index) -> torch.Tensor:
            return torch.randint(low, high, (batch,), generator=generator).to(dtype)

        def table(t: int) -> torch.Tensor:
            return torch.randint(0, 99, (batch, pages + t), generator=generator).to(index)

        smallest = min(sizes, default=1)
        state = vector(0, pages * smallest + 9), vector(0, 99), vector(-1, 20), vector(0, 1, torch.int32)
        accepted = vector(-1, rows + 2, torch.int32), vector(0, 99), vector(0, 3, torch.int32)
        given = None
        if grants:
            given = torch.stack(
                [torch.randint(-1, high, (batch, grants), generator=generator) for high in (4, pages + 3, 99)], dim=2
            ).int()
        tables = [table(t) for t in range(len(sizes))]
        return (*state, *accepted, tables, list(sizes), rows, given, block_slots, 98, first_page)

    return make


def _floor_bytes(*inputs: Any) -> int:
    state, tables, rows, grants, block_slots = inputs[:7], inputs[7], inputs[9], inputs[10], inputs[11]
    batch = state[0].shape[0]
    moved = nbytes(*state) + nbytes(*state[:4]) + nbytes(grants)
    entries = batch * sum(table.element_size() for table in tables)
    return moved + entries + batch * (8 * (2 * rows + 2 + len(tables) * (rows + 1) + block_slots) + 4)


ADVANCE = Spec(
    op="advance_round",
    cases=(
        Case("round", "the loop's own: three tables, grants, a block of known ids", _case(5, grants=7, block_slots=8)),
        Case("one_table", "an engine's own table, int32, nothing granted", _case(4, sizes=(64,), index=torch.int32)),
        Case("page_one", "token-granular pages, two tables of other sizes", _case(3, sizes=(1, 3), grants=2, rows=5)),
        Case("no_table", "an engine that keeps its own slots", _case(3, sizes=(), rows=1, block_slots=3)),
        Case("empty", "no request", _case(0, grants=2, block_slots=2)),
    ),
    floor_bytes=_floor_bytes,
    flops=lambda *_: 0,
    exact=True,
)

SPECS = (ADVANCE,)

_SECTOR = 32  # bytes; nothing smaller comes from memory


def _steady(generator: torch.Generator) -> tuple[Any, ...]:
    """Every request is live and commits, and the rows of one round lie in one sector of each table."""
    batch = 32
    made = list(_case(batch, sizes=(16, 16, 16), grants=6, pages=4096, block_slots=8, index=torch.int32)(generator))
    made[0] = torch.full((batch,), 16 * 1024 + 4)
    made[1], made[5] = made[1].long(), made[5].long()
    made[2] = torch.full((batch,), 100)
    made[4] = torch.randint(1, 9, (batch,), generator=generator).int()
    made[6] = torch.zeros(batch, dtype=torch.int32)
    made[10][:, :, 0] = -1
    return tuple(made)


def _moved(*inputs: Any) -> int:
    # besides the floor: whole sectors of the tables, and of the grants, which are all unused, the tables' numbers
    tables, grants = inputs[7], inputs[10]
    batch = grants.shape[0]
    sectors = batch * sum(_SECTOR - table.element_size() for table in tables)
    return _floor_bytes(*inputs) + sectors


TRAFFIC = (
    Traffic(
        "advance_round",
        Case("steady_b32", "a round of 32 requests with three tables and nothing granted", _steady),
        {"advance_round_kernel": _moved},
    ),
)
