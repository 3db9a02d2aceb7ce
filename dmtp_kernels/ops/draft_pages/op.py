"""Schemas, argument checks and dispatch of the temporary page tables."""

from __future__ import annotations

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import INDEX_DTYPES, check_range, check_same_device, check_tensor

_MOST_ROWS = 2**31 - 1


def draft_table_width(window: int, page_size: int, block_slots: int = 0) -> int:
    """Columns a draft table needs: pages touched by `window + block_slots` rows that start at the last row of a page.

    Raises:
        ValueError: `window` or `block_slots` is negative, `page_size` is below 1, or one is 2^31 or more.
    """
    check_range("window", window, 0, _MOST_ROWS)
    check_range("page_size", page_size, 1, _MOST_ROWS)
    check_range("block_slots", block_slots, 0, _MOST_ROWS)
    return (page_size - 1 + window + block_slots + page_size - 1) // page_size


def _check_width(columns: int, window: int, page_size: int, block_slots: int, width: int | None) -> None:
    needed = draft_table_width(window, page_size, block_slots)
    if width is not None and width < min(needed, columns):
        raise ValueError(
            f"width: is {width}, must be at least {min(needed, columns)} for window {window}, page_size {page_size}, "
            f"block_slots {block_slots} and {columns} pages a row"
        )


def _check(
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    window: int,
    page_size: int,
    block_slots: int,
    width: int | None,
    valid_from: torch.Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_tensor("page_table", page_table, ["B", "MP"], INDEX_DTYPES, sizes)
    check_tensor("ctx_len", ctx_len, ["B"], INDEX_DTYPES, sizes)
    if valid_from is not None:
        check_tensor("valid_from", valid_from, ["B"], INDEX_DTYPES, sizes)
    _check_width(sizes["MP"], window, page_size, block_slots, width)
    check_same_device("page_table", page_table.device, ctx_len=ctx_len, valid_from=valid_from)


def _check_from_slots(
    req_to_token: torch.Tensor,
    ctx_len: torch.Tensor,
    window: int,
    page_size: int,
    req_pool_indices: torch.Tensor | None,
    block_slots: int,
    width: int | None,
    valid_from: torch.Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_tensor("req_to_token", req_to_token, ["R", "max_len"], INDEX_DTYPES, sizes)
    check_tensor("ctx_len", ctx_len, ["B"], INDEX_DTYPES, sizes)
    for name, tensor in (("req_pool_indices", req_pool_indices), ("valid_from", valid_from)):
        if tensor is not None:
            check_tensor(name, tensor, ["B"], INDEX_DTYPES, sizes)
    if req_pool_indices is None and sizes["R"] < sizes["B"]:
        raise ValueError(
            f"req_to_token: has {sizes['R']} rows, must have at least the {sizes['B']} of ctx_len when "
            "req_pool_indices is None"
        )
    check_range("page_size", page_size, 1)
    _check_width(-(-sizes["max_len"] // page_size), window, page_size, block_slots, width)
    check_same_device(
        "req_to_token",
        req_to_token.device,
        ctx_len=ctx_len,
        req_pool_indices=req_pool_indices,
        valid_from=valid_from,
    )


def _result(batch: int, columns: int, window: int, page_size: int, block_slots: int, width: int | None) -> list[Shape]:
    if width is None:
        # a row that fits its source has no page beyond the source's; sym_min keeps `columns` symbolic under compile
        width = torch.sym_min(draft_table_width(window, page_size, block_slots), columns)
    return [((batch, width), torch.int32), ((batch,), torch.int32), ((batch,), torch.int32)]


def _shapes(
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    window: int,
    page_size: int,
    block_slots: int,
    width: int | None,
    valid_from: torch.Tensor | None,
) -> list[Shape]:
    return _result(ctx_len.shape[0], page_table.shape[1], window, page_size, block_slots, width)


def _shapes_from_slots(
    req_to_token: torch.Tensor,
    ctx_len: torch.Tensor,
    window: int,
    page_size: int,
    req_pool_indices: torch.Tensor | None,
    block_slots: int,
    width: int | None,
    valid_from: torch.Tensor | None,
) -> list[Shape]:
    columns = -(-req_to_token.shape[1] // page_size)
    return _result(ctx_len.shape[0], columns, window, page_size, block_slots, width)


_OUTS = ("draft_table", "draft_len", "kv_skip")
_REFERENCE = "dmtp_kernels.ops.draft_pages.reference"
_LAUNCH = "dmtp_kernels.ops.draft_pages.launch"
_CPU = "dmtp_kernels.ops.draft_pages.cpu"
_CUDA = "dmtp_kernels.ops.draft_pages.cuda"

DRAFT_PAGE_TABLE = define_op(
    "draft_page_table",
    args=(
        "Tensor page_table, Tensor ctx_len, *, int window, int page_size, int block_slots=0, int? width=None, "
        "Tensor? valid_from=None"
    ),
    outs=_OUTS,
    shapes=_shapes,
    check=_check,
    implementations={
        "triton": f"{_LAUNCH}:draft_page_table",
        "cuda": f"{_CUDA}:draft_page_table",
        "cpu": f"{_CPU}:draft_page_table",
        "reference": f"{_REFERENCE}:draft_page_table",
    },
)

DRAFT_PAGE_TABLE_FROM_SLOTS = define_op(
    "draft_page_table_from_slots",
    args=(
        "Tensor req_to_token, Tensor ctx_len, *, int window, int page_size, Tensor? req_pool_indices=None, "
        "int block_slots=0, int? width=None, Tensor? valid_from=None"
    ),
    outs=_OUTS,
    shapes=_shapes_from_slots,
    check=_check_from_slots,
    implementations={
        "triton": f"{_LAUNCH}:draft_page_table_from_slots",
        "cuda": f"{_CUDA}:draft_page_table_from_slots",
        "cpu": f"{_CPU}:draft_page_table_from_slots",
        "reference": f"{_REFERENCE}:draft_page_table_from_slots",
    },
)
