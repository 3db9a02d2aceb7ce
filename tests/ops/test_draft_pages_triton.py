"""The Triton kernel of the temporary page tables as a GPU would launch it: one launch, several tiles a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.draft_pages import draft_page_table, draft_page_table_from_slots, draft_table_width
from dmtp_kernels.testing import watch
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.poison import guarded
from tests.ops.conftest import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
OPS = ("draft_page_table", "draft_page_table_from_slots")


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with use_backend("triton", *OPS), planned_for(132):
        yield


def sources(rows: int, pages: int, page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A page table and the token-slot table that says the same."""
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(rows)).view(rows, pages) + 1
    slots = (table[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    return table.to(dtype), slots.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("window", "page_size", "block_slots"), [(300, 1, 8), (127, 1, 0), (2100, 16, 8), (400, 3, 5)])
def test_tables_of_several_tiles(window: int, page_size: int, block_slots: int, dtype: torch.dtype) -> None:
    # 128 columns a program: widths of 127, 132, 135 and 308
    rows = 4
    pages = -(-2 * window // page_size)
    table, slots = sources(rows, pages, page_size, dtype)
    capacity = pages * page_size
    ctx_len = torch.tensor([capacity - block_slots, window + page_size // 2, capacity, 5], dtype=dtype)
    options: dict[str, Any] = {"window": window, "page_size": page_size, "block_slots": block_slots}
    options["valid_from"] = torch.tensor([0, 11, 3, -9], dtype=dtype)
    with use_backend("reference"):
        want = draft_page_table(table, ctx_len, **options)
    assert want.kv_skip[2] == (-1 if block_slots else (capacity - window) % page_size)
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        got = draft_page_table(table, ctx_len, **options)
    assert len(launched) == 1
    pool = torch.tensor([3, 2, 1, 0], dtype=dtype)
    from_slots = draft_page_table_from_slots(slots.flip(0), ctx_len, req_pool_indices=pool, **options)
    for a, b, c in zip(want, got, from_slots, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_only_what_the_window_needs_is_read() -> None:
    # entries outside it may hold anything and lie in memory that is not there to be read at all
    table, slots = sources(2, 700, 4, torch.int32)
    ctx_len = torch.tensor([2000, 1205])
    for op, source, step in ((draft_page_table, table, 1), (draft_page_table_from_slots, slots, 4)):
        read: set[int] = set()

        def note(access: watch.Access, base: int = source.data_ptr(), read: set[int] = read) -> None:
            if access.kind == "load" and access.owner() == "source_ptr":
                read.update(((access.addresses.astype("int64") - base) // 4).tolist())

        with watch.watch(note):
            op(source, ctx_len, window=1000, page_size=4, block_slots=8)
        columns = [*range(1000 // 4, 2008 // 4), *range(700 + 205 // 4, 700 + -(-1213 // 4))]
        assert read == {c * step for c in columns}


def test_out_form_allocates_nothing_and_stays_inside_its_buffers() -> None:
    table, _ = sources(3, 400, 16, torch.int32)
    ctx_len, width = torch.tensor([6300, 0, 5000]), draft_table_width(4096, 16, 8)
    shapes = {"draft_table": (3, width), "draft_len": (3,), "kv_skip": (3,)}
    buffers = {name: guarded(shape, torch.int32) for name, shape in shapes.items()}
    outputs = {name: buffer.tensor for name, buffer in buffers.items()}
    options = {"window": 4096, "page_size": 16, "block_slots": 8}
    for _ in range(2):
        with capture_safe(allocations=False):
            torch.ops.dmtp.draft_page_table_out(table, ctx_len, **options, **outputs)
    for buffer in buffers.values():
        buffer.check()
    want = draft_page_table(table, ctx_len, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(outputs.values(), want, strict=True))


def test_row_074_addresses_past_int32() -> None:
    # https://github.com/vllm-project/vllm/pull/47671: row 8 of a token-slot table whose rows are 2^28 entries apart
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        slots = torch.empty(8 * 2**28 + 64, dtype=torch.int32).as_strided((9, 64), (2**28, 1))
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
    for row in (7, 8):
        slots[row] = torch.arange(64) + 640 * row
    got = draft_page_table_from_slots(
        slots, torch.tensor([60, 60]), window=40, page_size=16, req_pool_indices=torch.tensor([7, 8])
    )
    assert got.draft_table.tolist() == [[281, 282, 283, 0], [321, 322, 323, 0]]
