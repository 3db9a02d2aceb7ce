"""Temporary page tables against plain loops over positions; dead rows, narrow tables, token-slot tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.draft_pages import draft_page_table, draft_page_table_from_slots, draft_table_width

KERNEL_OPS = ("draft_page_table", "draft_page_table_from_slots")
EVERY_CAPABILITY = True

from_pages: Any = draft_page_table
from_slots: Any = draft_page_table_from_slots


def table_of(batch: int, pages: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Page ids in shuffled order, none of them 0."""
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(batch))
    return (order.view(batch, pages) + 1).to(dtype)


def slots_of(table: torch.Tensor, page_size: int) -> torch.Tensor:
    return (table[:, :, None] * page_size + torch.arange(page_size)).flatten(1).to(table.dtype)


def by_loops(
    row: list[int], ctx_len: int, window: int, page_size: int, block_slots: int, width: int, valid_from: int
) -> tuple[list[int], int, int]:
    """The pages that hold any wanted row, in order of position."""
    if ctx_len <= 0:
        return [0] * width, 0, 0
    if ctx_len + block_slots > len(row) * page_size:
        return [0] * width, -1, -1
    wanted = [p for p in range(ctx_len) if p >= valid_from and p >= ctx_len - window]
    start = wanted[0] if wanted else ctx_len
    first = next(j for j in range(len(row) + 1) if (j + 1) * page_size > start)
    # rows from the first page's own start to the end of the block, and nothing after
    pages = [row[j] for j in range(first, len(row)) if j * page_size < ctx_len + block_slots]
    return pages + [0] * (width - len(pages)), ctx_len - first * page_size, start - first * page_size


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("block_slots", [0, 8])
@pytest.mark.parametrize(("window", "page_size"), [(0, 4), (1, 1), (5, 1), (5, 4), (16, 16), (33, 16), (100, 7)])
def test_every_length_matches_the_loops(window: int, page_size: int, block_slots: int, dtype: torch.dtype) -> None:
    # one batch row per length, so every start offset in a page and both ends of the table occur
    pages = -(-70 // page_size)
    lengths = list(range(-2, pages * page_size + 3))
    table = table_of(len(lengths), pages, dtype)
    ctx_len = torch.tensor(lengths, dtype=dtype)
    valid = torch.randint(-3, 75, (len(lengths),), generator=torch.Generator().manual_seed(5)).to(dtype)
    options: dict[str, Any] = {"window": window, "page_size": page_size, "block_slots": block_slots}
    for valid_from in (None, valid):
        got = from_pages(table, ctx_len, valid_from=valid_from, **options)
        width = min(draft_table_width(window, page_size, block_slots), pages)
        assert got.draft_table.shape == (len(lengths), width)
        assert {t.dtype for t in got} == {torch.int32}
        for b, length in enumerate(lengths):
            skip = 0 if valid_from is None else int(valid_from[b])
            want = by_loops(table[b].tolist(), length, window, page_size, block_slots, width, skip)
            assert (got.draft_table[b].tolist(), got.draft_len[b].item(), got.kv_skip[b].item()) == want, length
        slots = from_slots(slots_of(table, page_size), ctx_len, valid_from=valid_from, **options)
        for a, b in zip(slots, got, strict=True):
            assert torch.equal(a, b)


def test_row_062_window_start_in_mid_page() -> None:
    # https://github.com/vllm-project/vllm/pull/2231: the last 256 of 257 pages hold 4,081 of 4,097 rows
    for page_size in (16, 64):
        pages = -(-8200 // page_size)
        table = table_of(1, pages)
        for history in (4095, 4096, 4097, 4100, 4111, 4112, 8191):
            got = from_pages(table, torch.tensor([history]), window=4096, page_size=page_size)
            start = max(history - 4096, 0)
            assert got.kv_skip.item() == start % page_size
            assert got.draft_len.item() - got.kv_skip.item() == min(history, 4096)
            assert got.draft_table[0, 0] == table[0, start // page_size]


def test_row_057_zero_length_and_dead_rows_are_inert() -> None:
    # stale ids of a padded row must not come out, with or without block pages
    table = table_of(3, 4)
    for block_slots in (0, 8):
        got = from_pages(table, torch.tensor([0, -1, -(2**31)]), window=8, page_size=4, block_slots=block_slots)
        assert all((t == 0).all() for t in got)


def test_row_059_a_row_does_not_depend_on_the_batch() -> None:
    # https://github.com/openvinotoolkit/openvino/pull/38034: lens [160, 83]: row 1 needs one page more than row 0
    table = table_of(2, 11)
    both = from_pages(table, torch.tensor([160, 83]), window=64, page_size=16)
    alone = from_pages(table[1:], torch.tensor([83]), window=64, page_size=16)
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, both, strict=True))
    assert [(row != 0).sum().item() for row in both.draft_table] == [4, 5]


def test_row_077_block_past_the_table_is_refused() -> None:
    # https://github.com/sgl-project/sglang/pull/35985: 124 + 8 rows need nine pages of 16
    wide = torch.full((2, 11), 2**40)
    wide[:, 1:10] = table_of(2, 9)
    options: dict[str, Any] = {"window": 64, "page_size": 16, "block_slots": 8}
    nine = from_pages(wide[:, 1:10], torch.tensor([124, 137]), **options)
    assert nine.kv_skip.tolist() == [60 % 16, -1] and nine.draft_len[1] == -1 and (nine.draft_table[1] == 0).all()
    assert (nine.draft_table[0, :6] == wide[0, 4:10]).all() and (nine.draft_table < 2**20).all()
    eight = from_pages(wide[:, 1:9], torch.tensor([120, 124]), **options)
    assert eight.kv_skip.tolist() == [56 % 16, -1]
    # a token-slot table ends where its rows end, in mid-page too
    slots = slots_of(table_of(2, 9), 16)[:, :130]
    assert from_slots(slots, torch.tensor([122, 123]), **options).kv_skip.tolist() == [58 % 16, -1]


def test_row_077_a_refused_row_attends_to_nothing() -> None:
    # with a length of 0 it would attend its block alone, and nobody would notice
    generator = torch.Generator().manual_seed(3)
    cache, block = (torch.randn(*n, 2, 16, generator=generator) for n in ((40, 16), (2, 8)))
    table = table_of(2, 9)
    ctx_len = torch.tensor([136, 140])
    got = from_pages(table, ctx_len, window=64, page_size=16, block_slots=8)
    out, lse = block_attention(
        torch.randn(2, 8, 4, 16, generator=generator),
        cache,
        cache,
        got.draft_table,
        got.draft_len,
        block_k=block,
        block_v=block,
        valid_from=got.kv_skip,
    )
    assert lse[0].isfinite().all() and (out[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_row_083_valid_from_moves_the_start() -> None:
    # https://github.com/weicj/vLLM-2080Ti-Definitive/pull/194: rows of a reused prefix were never written
    table = table_of(3, 8)
    got = from_pages(
        table, torch.tensor([100, 100, 20]), window=4096, page_size=16, valid_from=torch.tensor([32, 37, 50])
    )
    assert got.draft_table[:2, 0].tolist() == table[:2, 2].tolist()
    assert got.kv_skip.tolist() == [0, 5, 4] and got.draft_len.tolist() == [68, 68, 4]


@pytest.mark.parametrize("garbage", [-1, -(2**62), 2**62])
def test_stale_and_unmapped_entries(garbage: int) -> None:
    # entries outside the window never come out; inside it an id no int32 table can hold becomes page 0
    table = table_of(1, 6)
    want = from_pages(table, torch.tensor([40]), window=10, page_size=8)
    stale = table.clone()
    stale[0, [0, 1, 2, 5]] = garbage
    got = from_pages(stale, torch.tensor([40]), window=10, page_size=8)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    stale[0, 4] = garbage
    got = from_pages(stale, torch.tensor([40]), window=10, page_size=8)
    assert got.draft_table[0].tolist() == [table[0, 3].item(), 0, 0]


def test_pool_rows_are_selected_and_bounded() -> None:
    # SGLang: request b lives in row req_pool_indices[b]; padded rows point to row 0, dead ones anywhere
    slots = slots_of(table_of(4, 5), 8)
    rows = torch.tensor([3, 0, -1, 4, 2])
    options: dict[str, Any] = {"window": 12, "page_size": 8}
    got = from_slots(slots, torch.full((5,), 33), req_pool_indices=rows, **options)
    want = from_slots(slots[[3, 0, 2]], torch.full((3,), 33), **options)
    assert all(torch.equal(a[[0, 1, 4]], b) for a, b in zip(got, want, strict=True))
    assert all((t[2:4] == 0).all() for t in got)


def test_strided_tables_and_wide_results() -> None:
    wide = torch.full((3, 9), -7)
    wide[:, 2:8] = table_of(3, 6)
    view, ctx_len = wide[:, 2:8], torch.tensor([5, 40, 48])
    want = from_pages(view.clone(), ctx_len, window=20, page_size=8)
    got = from_pages(view, ctx_len, window=20, page_size=8, width=30)
    assert torch.equal(got.draft_table[:, : want.draft_table.shape[1]], want.draft_table)
    assert (got.draft_table[:, want.draft_table.shape[1] :] == 0).all()
    # the table itself bounds the width from above
    short = from_pages(view, ctx_len, window=4096, page_size=8, width=6)
    assert short.draft_table[2].tolist() == view[2].tolist()


def test_out_form_writes_only_its_buffers() -> None:
    table, ctx_len = table_of(2, 4), torch.tensor([30, 0])
    around = torch.full((4, 8), 77, dtype=torch.int32)
    lens = torch.full((2, 4), 77, dtype=torch.int32)
    torch.ops.dmtp.draft_page_table_out(
        table,
        ctx_len,
        window=8,
        page_size=8,
        draft_table=around[1:3, 2:4],
        draft_len=lens[0, 1:3],
        kv_skip=lens[1, 1:3],
    )
    assert around[1:3, 2:4].tolist() == [table[0, 2:4].tolist(), [0, 0]]
    assert lens.tolist() == [[77, 14, 0, 77], [77, 6, 0, 77]]
    around[1:3, 2:4] = 77
    assert (around == 77).all()


@pytest.mark.parametrize("columns", [0, 2])
def test_row_175_empty_batch_and_empty_tables(columns: int) -> None:
    # https://github.com/triton-lang/triton-ascend/issues/984
    none = torch.zeros(0, dtype=torch.int64)
    for op in (from_pages, from_slots):
        got = op(torch.zeros(0, columns, dtype=torch.int64), none, window=8, page_size=4)
        assert [t.shape[0] for t in got] == [0, 0, 0]
    got = from_pages(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 3]), window=8, page_size=4)
    assert got.kv_skip.tolist() == got.draft_len.tolist() == [0, -1] and got.draft_table.shape == (2, 0)


def test_default_width_ends_where_the_source_does() -> None:
    # a window without a limit has no column the source lacks; nothing depends on lengths
    table, ctx_len = table_of(2, 6), torch.tensor([41, 1])
    for window in (48, 2**31 - 1):
        got = from_pages(table, ctx_len, window=window, page_size=8, block_slots=7)
        assert got.draft_table.tolist() == [table[0].tolist(), [int(table[1, 0]), 0, 0, 0, 0, 0]]
        slots = from_slots(slots_of(table, 8)[:, :48], ctx_len, window=window, page_size=8, block_slots=7)
        assert all(torch.equal(a, b) for a, b in zip(slots, got, strict=True))
        # a last page of which the source has one slot is a column too
        ragged = from_slots(slots_of(table, 8)[:, :41], torch.tensor([41, 1]), window=window, page_size=8)
        assert ragged.draft_table.shape == (2, 6)
    assert from_pages(table, ctx_len, window=8, page_size=8).draft_table.shape == (2, 2)


def test_width_is_enough_and_tight() -> None:
    for window, page_size, block_slots in [(0, 1, 0), (0, 4, 0), (1, 1, 8), (20, 8, 8), (4096, 16, 8), (5, 7, 3)]:
        used = set()
        for ctx_len in range(window, window + 3 * page_size + 1):
            first = (ctx_len - window) // page_size
            used.add(-(-(ctx_len + block_slots) // page_size) - first)
        assert draft_table_width(window, page_size, block_slots) == max(used)


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "narrow": ({"width": 3}, ValueError, "width: is 3, must be at least 4"),
    "window": ({"window": -1}, ValueError, "window: is -1"),
    "page_size": ({"page_size": 0}, ValueError, "page_size: is 0"),
    "block_slots": ({"block_slots": -1}, ValueError, "block_slots: is -1"),
    "ctx_len": ({"ctx_len": torch.zeros(2)}, TypeError, "ctx_len: dtype"),
    "valid_from": ({"valid_from": torch.zeros(3, dtype=torch.int64)}, ValueError, "valid_from: dimension 0"),
    "table": ({"page_table": torch.zeros(2, 9, 1, dtype=torch.int64)}, ValueError, "page_table: has 3 dimensions"),
    "stride": ({"page_table": torch.zeros(9, 2, dtype=torch.int64).t()}, ValueError, "page_table: last dimension"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_argument(case: str) -> None:
    change, error, message = REFUSALS[case]
    arguments: dict[str, Any] = {
        "page_table": torch.zeros(2, 9, dtype=torch.int64),
        "ctx_len": torch.zeros(2, dtype=torch.int64),
        "window": 20,
        "page_size": 8,
    }
    with pytest.raises(error, match=message):
        from_pages(**{**arguments, **change})


def test_a_slot_table_with_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="req_to_token: has 1 rows"):
        from_slots(torch.zeros(1, 64, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), window=8, page_size=8)
