"""Launch knobs of the temporary page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._variant import Variant


@dataclass(frozen=True)
class TableConfig:
    """Knobs of the one launch."""

    columns: int
    """Table entries of one program."""
    warps: int


# not measured: nothing but latency counts, so a thread has one entry, and 257 columns of 32 requests are 96 programs
_PARALLEL = TableConfig(columns=128, warps=4)
# interpreted programs cost by their number
_INTERPRETED = TableConfig(columns=1024, warps=4)


def table_config(device: torch.device) -> TableConfig:
    """The knobs on a device."""
    return _PARALLEL if processors(device) else _INTERPRETED


_NAMES = (
    "source_ptr source_stride source_rows pool_ptr ctx_ptr valid_ptr capacity window block_slots draft_ptr "
    "draft_stride draft_column_stride width len_ptr len_stride skip_ptr skip_stride tiles"
)


def _variant(name: str, page_size: int, dtype: str, *, pool: bool, valid: bool, slots: bool) -> Variant:
    absent = {"pool_ptr": pool, "valid_ptr": valid}
    present = [n for n in _NAMES.split() if absent.get(n, True)]
    kinds = {"draft_ptr": "*i32", "len_ptr": "*i32", "skip_ptr": "*i32"}
    one = ("draft_column_stride", "len_stride", "skip_stride")  # a stride of 1 is compiled in
    return Variant(
        name=f"draft_page_table_kernel/{name}_p{page_size}",
        kernel="dmtp_kernels.ops.draft_pages.kernels:draft_page_table_kernel",
        signature={n: kinds.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in present if n not in one},
        constants={n: None for n, given in absent.items() if not given}
        | dict.fromkeys(one, 1)
        | {"PAGE_SIZE": page_size, "SLOTS": slots, "COLUMNS": _PARALLEL.columns},
        num_warps=_PARALLEL.warps,
    )


def variants() -> tuple[Variant, ...]:
    """Both sources at the page sizes engines use; 48 is no power of two."""
    pages = [_variant("pages_i32", size, "i32", pool=False, valid=False, slots=False) for size in (1, 16, 48, 64, 256)]
    slots = [_variant("slots_i32", size, "i32", pool=True, valid=False, slots=True) for size in (1, 16, 48, 64)]
    return (
        *pages,
        *slots,
        _variant("pages_i64", 16, "i64", pool=False, valid=True, slots=False),
        _variant("slots_i64", 64, "i64", pool=True, valid=True, slots=True),
    )
