"""The Triton kernel of the round's bookkeeping: one launch, far operands, nothing read that is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.advance import advance_round
from dmtp_kernels.testing import watch
from tests.ops.conftest import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


def call(length: torch.Tensor, tables: list[torch.Tensor], **options: Any) -> Any:
    batch = length.shape[0]
    state = (length, torch.full((batch,), 3), torch.full((batch,), 99), torch.zeros(batch, dtype=torch.int64))
    accepted = (torch.ones(batch, dtype=torch.int64), torch.full((batch,), 4), torch.zeros(batch, dtype=torch.int64))
    with use_backend("triton", "advance_round"):
        op: Any = advance_round
        return op(*state, *accepted, tables, page_sizes=[16] * len(tables), rows=8, **options)


def test_one_launch_reads_the_entries_of_its_rows_alone() -> None:
    tables = [torch.randint(1, 99, (3, 40)) for _ in range(3)]
    grants = torch.full((3, 5, 3), -1, dtype=torch.int32)
    launched, entries = set(), set()

    def note(access: watch.Access) -> None:
        launched.add(access.launch)
        if access.kind == "load" and access.owner() == "table0_ptr":
            entries.update(((access.addresses.astype("int64") - tables[0].data_ptr()) // 8).tolist())

    with watch.watch(note):
        call(torch.tensor([15, 300, 0]), tables, grants=grants, block_slots=8)
    assert len(launched) == 1
    # rows a - 1 .. a + 7 after one token: 15..23, 300..308, 0..8
    assert entries == {0, 1, 40 + 18, 40 + 19, 80}


def test_row_074_addresses_past_int32() -> None:
    # https://github.com/vllm-project/vllm/pull/47671: rows of a table 2^28 entries apart, page ids beyond 2^31 / 16
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        table = torch.empty(8 * 2**28 + 64, dtype=torch.int32).as_strided((9, 64), (2**28, 1))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
    for row in range(9):
        table[row] = torch.arange(64) + 2**28 + 64 * row
    got = call(torch.full((9,), 32), [table])
    assert got.slots[8, 0].tolist() == [(2**28 + 64 * 8 + 2) * 16 + 1 + j for j in range(8)]
    assert got.error.tolist() == [0] * 9
