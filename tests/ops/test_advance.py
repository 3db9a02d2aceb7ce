"""The round's bookkeeping against plain loops over requests; grants, inert rows, counts out of range, odd layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.advance import BAD_COUNT, BAD_GRANT, NO_PAGE, advance_round
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.poison import guarded

KERNEL_OPS = ("advance_round",)
EVERY_CAPABILITY = True
STATE = ("length", "anchor", "budget", "finished")


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def by_loops(
    state: dict[str, list[int]],
    accepted: list[list[int]],
    tables: list[list[list[int]]],
    sizes: list[int],
    rows: int,
    grants: list[list[list[int]]],
    block_slots: int,
    mask_id: int,
    first_page: int,
) -> dict[str, Any]:
    """One request after the other; `state` and `tables` are changed in place, like the op's."""
    out: dict[str, list[Any]] = {n: [] for n in ("positions", "context_len", "slots", "previous", "block_ids", "error")}
    for b, (count, bonus, ended) in enumerate(zip(*accepted, strict=True)):
        error = 0
        was_live = state["budget"][b] > 0
        if was_live and count > 0:
            taken = min(count, rows)
            state["length"][b] += taken
            state["anchor"][b], state["finished"][b] = bonus, ended
            state["budget"][b] = 0 if ended else max(state["budget"][b] - taken, 0)
        for table, column, page in grants[b]:
            if table < 0:
                continue
            if table >= len(tables) or not 0 <= column < len(tables[table][b]) or page < first_page:
                error |= BAD_GRANT
            else:
                tables[table][b][column] = page
        live = state["budget"][b] > 0
        if live and not 0 <= count <= rows:
            error |= BAD_COUNT
        a = state["length"][b] if live else 0

        def slot(t: int, position: int, b: int = b, live: bool = live) -> int:
            row = tables[t][b]
            if not live or not 0 <= position < len(row) * sizes[t]:
                return -1
            page = row[position // sizes[t]]
            return -1 if page < first_page else page * sizes[t] + position % sizes[t]

        slots = [[slot(t, a + j) for j in range(rows)] for t in range(len(tables))]
        if live and any(s < 0 for row in slots for s in row[: state["budget"][b]]):
            error |= NO_PAGE
        out["positions"].append([a + j for j in range(rows)])
        out["context_len"].append(a)
        out["slots"].append(slots)
        out["previous"].append([slot(t, a - 1) for t in range(len(tables))])
        out["block_ids"].append([state["anchor"][b] if live and s == 0 else mask_id for s in range(block_slots)])
        out["error"].append(error)
    return out


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("sizes", "rows", "grants", "block_slots", "first_page"),
    [((16, 16, 16), 8, 9, 8, 1), ((1,), 8, 0, 0, 1), ((3, 64), 5, 3, 1, 0), ((), 1, 2, 7, 0), ((5, 2, 1), 4, 20, 0, 7)],
)
def test_every_field_matches_the_loops(
    sizes: tuple[int, ...], rows: int, grants: int, block_slots: int, first_page: int, index: torch.dtype
) -> None:
    batch, pages = 24, 6
    generator = torch.Generator().manual_seed(grants)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape or (batch,), generator=generator)

    tensors = {
        "length": draw(0, pages * min(sizes, default=9) + 3).to(index),
        "anchor": draw(0, 99).to(index),
        "budget": draw(-2, 12).to(index),
        "finished": torch.zeros(batch, dtype=torch.int32),
    }
    accepted = [draw(-2, rows + 3).to(torch.int32), draw(0, 99), draw(0, 5).clamp(min=2).sub(2).to(torch.int32)]
    # page 0 and pages below `first_page` are not mapped; columns repeat, lie outside, name tables that are not there
    tables = [draw(0, 30, batch, pages + t).to(index) for t in range(len(sizes))]
    given = torch.stack(
        [draw(-1, 4, batch, grants), draw(-1, pages + 2, batch, grants), draw(-1, 30, batch, grants)], 2
    )
    given = given.int()
    lists = {name: t.tolist() for name, t in tensors.items()}
    expected_tables = [t.tolist() for t in tables]
    arguments = (list(sizes), rows, given.tolist(), block_slots, 98, first_page)
    want = by_loops(lists, [t.tolist() for t in accepted], expected_tables, *arguments)
    call: Any = advance_round
    got = call(
        *tensors.values(), *accepted, tables,
        page_sizes=sizes, rows=rows, grants=given if grants else None, block_slots=block_slots, mask_id=98,
        first_page=first_page,
    )  # fmt: skip
    assert {name: t.tolist() for name, t in tensors.items()} == lists
    assert [t.tolist() for t in tables] == expected_tables
    assert got.positions.tolist() == want["positions"]
    assert torch.equal(got.token_positions, got.positions + 1)
    assert got.context_len.tolist() == want["context_len"]
    assert torch.equal(got.history_len, (got.context_len - 1).clamp(min=0))
    assert got.slots.tolist() == want["slots"]
    assert got.previous_slots.tolist() == want["previous"]
    assert got.block_ids.tolist() == want["block_ids"]
    assert got.error.tolist() == want["error"]
    assert grants == 0 or int(given[:, :, 0].max()) == -1  # consumed: the same call again grants nothing
    seen = {bit for error in want["error"] for bit in (1, 2, 4) if error & bit}
    assert seen >= ({BAD_COUNT, NO_PAGE} if sizes else {BAD_COUNT}) | ({BAD_GRANT} if grants else set())


def one(
    length: Any,
    count: Any,
    budget: Any,
    *,
    table: torch.Tensor | None = None,
    page_size: int = 4,
    rows: int = 8,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], Any]:
    """A call with one table; the state after it, and the index."""
    batch = len(length)
    state = {"length": ints(*length), "anchor": torch.full((batch,), 5), "budget": ints(*budget)}
    state["finished"] = torch.zeros(batch, dtype=torch.int32)
    ended = more.pop("ended", torch.zeros(batch, dtype=torch.int32))
    if table is None:
        table = 1 + torch.arange(batch * 40).view(batch, 40)
    call: Any = advance_round
    index = call(
        *state.values(), ints(*count), torch.full((batch,), 9), ended, [table], page_sizes=[page_size], rows=rows,
        first_page=1, **more,
    )  # fmt: skip
    return state, index


def test_row_093_padded_rows_are_not_advanced() -> None:
    # https://github.com/vllm-project/vllm/pull/43682: lengths [37, 0, 12, 0], entries of rows 1 and 3 are -1
    table = torch.full((4, 20), -1)
    table[0], table[2] = torch.arange(1, 21), torch.arange(21, 41)
    state, index = one([37, 0, 12, 0], [1, 1, 1, 1], [9, 0, 9, 0], table=table)
    assert state["length"].tolist() == [38, 0, 13, 0]
    assert state["anchor"].tolist() == [9, 5, 9, 5]
    assert index.slots[[1, 3]].unique().tolist() == [-1]
    assert index.slots[0, 0].tolist() == [10 * 4 + 2, 10 * 4 + 3, *range(44, 50)]
    assert index.error.tolist() == [0, 0, 0, 0]


def test_rows_101_102_counts_out_of_range() -> None:
    # vllm#48475, vllm#50021: counts 0, 1, 8, 9, 2^31 - 1 and -1 of eight rows
    state, index = one([20] * 6, [0, 1, 8, 9, 2**31 - 1, -1], [50] * 6)
    assert state["length"].tolist() == [20, 21, 28, 28, 28, 20]
    assert state["budget"].tolist() == [50, 49, 42, 42, 42, 50]
    assert index.error.tolist() == [0, 0, 0, BAD_COUNT, BAD_COUNT, BAD_COUNT]


def test_row_155_whatever_a_padded_row_holds_changes_nothing() -> None:
    # https://github.com/vllm-project/vllm/issues/41841: every input of row 1 at its most
    most = 2**63 - 1
    plain, want = one([7, 3], [2, 2], [9, 0])
    odd, got = one(
        [7, most], [2, most], [9, -most], table=torch.cat([1 + torch.arange(40)[None], torch.full((1, 40), most)])
    )
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    assert odd["length"].tolist() == [9, most] and plain["length"].tolist() == [9, 3]


def test_row_079_lengths_leave_out_what_was_rejected() -> None:
    # https://github.com/vllm-project/vllm-ascend/pull/14883: 44 committed, 8 verified, 5 kept
    state, index = one([44], [5], [99])
    assert state["length"].tolist() == index.context_len.tolist() == [49]
    assert index.positions[0].tolist() == list(range(49, 57))
    assert index.history_len.tolist() == [48]


def test_row_109_a_round_may_need_several_pages() -> None:
    # https://github.com/ROCm/ATOM/pull/250: three rows and a round of eight take three pages of four, eleven of one
    for page_size, pages in ((4, 3), (1, 11)):
        table = torch.zeros(1, 12, dtype=torch.int64)
        table[0, :pages] = 1 + torch.arange(pages)
        assert one([3], [0], [9], table=table, page_size=page_size)[1].error.tolist() == [0]
        table[0, pages - 1] = 0
        assert one([3], [0], [9], table=table, page_size=page_size)[1].error.tolist() == [NO_PAGE]
        # a request that ends before it gets there needs no page there
        assert one([3], [0], [5], table=table, page_size=page_size)[1].error.tolist() == [0]


def test_a_page_granted_in_this_call_is_used_by_it() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    table[:, 0] = ints(7, 8, dtype=torch.int32)
    grants = torch.full((2, 4, 3), -1, dtype=torch.int32)
    grants[0, 2] = ints(0, 1, 4, dtype=torch.int32)
    grants[0, 3] = ints(0, 1, 5, dtype=torch.int32)  # the later one counts
    grants[1, 0] = ints(0, 3, 6, dtype=torch.int32)  # a column that is not there
    _, index = one([2, 2], [1, 1], [9, 9], table=table, grants=grants)
    assert table.tolist() == [[7, 5, 0], [8, 0, 0]]
    assert index.slots[:, 0].tolist() == [[31, *range(20, 24), -1, -1, -1], [35] + [-1] * 7]
    assert index.previous_slots.tolist() == [[30], [34]]
    assert index.error.tolist() == [NO_PAGE, BAD_GRANT | NO_PAGE]


def test_rows_114_115_an_ended_request_is_inert_at_once() -> None:
    state, index = one([8, 8, 8], [3, 3, 3], [9, 3, 9], ended=ints(1, 0, 0, dtype=torch.int32))
    assert state["budget"].tolist() == [0, 0, 6]
    assert state["finished"].tolist() == [1, 0, 0]
    assert state["length"].tolist() == [11, 11, 11]
    assert index.context_len.tolist() == [0, 0, 11]
    assert index.slots[:2].unique().tolist() == [-1]


def test_columns_of_wider_tables_are_taken_as_they_are() -> None:
    whole = torch.full((5, 6), -7, dtype=torch.int32)
    whole[:, 1], whole[:, 3], whole[:, 5] = 9, 3, 4
    table = torch.full((5, 9, 2), 2**31 - 1, dtype=torch.int32)
    table[:, :8, 0] = torch.arange(1, 41, dtype=torch.int32).view(5, 8)
    column = table[:, :8, 0]
    with pytest.raises(ValueError, match=r"page_tables\[0\]: last dimension has stride 2"):
        one([1] * 5, [0] * 5, [9] * 5, table=column)
    got = advance_round(
        whole[:, 1], whole[:, 0], whole[:, 5], whole[:, 2], whole[:, 3], whole[:, 4], torch.zeros(5, dtype=torch.int64),
        [column.contiguous()], page_sizes=[4], rows=4,
    )  # fmt: skip
    assert whole[0].tolist() == [-7, 12, 0, 3, -7, 1]
    assert got.positions[4].tolist() == [12, 13, 14, 15]
    assert got.slots[4, 0].tolist() == [36 * 4, 36 * 4 + 1, 36 * 4 + 2, 36 * 4 + 3]


def test_out_form_writes_strided_buffers_and_nothing_else(backend: str) -> None:
    state = {n: ints(30, 0, 12) for n in STATE}
    accepted = ints(2, 2, 9), ints(3, 3, 3), ints(0, 0, 0)
    tables = [1 + torch.arange(60).view(3, 20), torch.arange(60, dtype=torch.int32).view(3, 20)]
    grants = torch.full((3, 2, 3), -1, dtype=torch.int32)
    options: dict[str, Any] = {"page_sizes": [4, 16], "rows": 8, "grants": grants, "block_slots": 8, "mask_id": 50}
    with use_backend("reference"):
        call: Any = advance_round
        want = call(*[t.clone() for t in state.values()], *accepted, tables, **options)
    buffers = {n: guarded(t.shape, t.dtype, row_gap=3) for n, t in want._asdict().items()}
    outputs = {n: buffer.tensor for n, buffer in buffers.items()}
    run = torch.ops.dmtp.advance_round_out
    run(*[t.clone() for t in state.values()], *accepted, tables, **options, **outputs)
    moved = [t.clone() for t in state.values()]
    with capture_safe(allocations=backend == "reference"):
        run(*moved, *accepted, tables, **options, **outputs)
    for name, buffer in buffers.items():
        buffer.check()
        assert torch.equal(buffer.tensor, getattr(want, name)), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows: is 0, must be between 1 and 256"),
        ({"page_sizes": [4, 4]}, "page_sizes: has 2 entries, must have 1 like page_tables"),
        ({"page_sizes": [0]}, r"page_sizes\[0\]: is 0, must be between 1"),
        ({"mask_id": -1}, "mask_id: is -1"),
        ({"first_page": -1}, "first_page: is -1"),
        ({"block_slots": 1000}, "block_slots: is 1000"),
        ({"grants": torch.zeros(2, 1, 4, dtype=torch.int32)}, r"grants: dimension 2 is 4, must be 3"),
        ({"grants": torch.zeros(3, 1, 3, dtype=torch.int32)}, r"grants: dimension 0 \(B\) is 3, must be 2"),
        (
            {"page_tables": [torch.zeros(2, 3)] * 4, "page_sizes": [4] * 4},
            "page_tables: has 4 tables, must have at most 3",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"page_tables": [torch.zeros(2, 3, dtype=torch.int32)], "page_sizes": [4], "rows": 8}
    options |= change
    tables = options.pop("page_tables")
    call: Any = advance_round
    with pytest.raises(ValueError, match=message):
        call(*[torch.zeros(2, dtype=torch.int64)] * 7, tables, **options)
    with pytest.raises(TypeError, match=r"length: dtype is torch\.float32"):
        call(torch.zeros(2), *[torch.zeros(2, dtype=torch.int64)] * 6, rows=8)
