"""The caches of engines, as the page of block attention says to pass them, against pages written one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.draft_pages import draft_page_table_from_slots

KERNEL_OPS = ("block_attention", "draft_page_table_from_slots")
PAGES, P, HKV, D = 7, 4, 2, 16
Q, K, V = (
    torch.randn(n, generator=torch.Generator().manual_seed(sum(n))) for n in ((2, 3, 4, D), *[(PAGES, P, HKV, D)] * 2)
)
TABLE = torch.tensor([[3, 1, 6, 0], [5, 2, 4, 0]])
CTX_LEN = torch.tensor([9, 5])
POOL = torch.tensor([2, 1])
SLOTS = torch.zeros(3, 4 * P, dtype=torch.int64)
SLOTS[POOL] = (TABLE[:, :, None] * P + torch.arange(P)).flatten(1)


def copied(x: torch.Tensor, *dims: int) -> torch.Tensor:
    return x.permute(dims).contiguous()


def packed() -> Any:
    kv = torch.cat((copied(K, 0, 2, 1, 3), copied(V, 0, 2, 1, 3)), dim=-1)  # [blocks, Hkv, P, 2 * D]
    return *kv.transpose(1, 2).split(D, -1), TABLE


def slots_of_one_row() -> Any:
    return K.view(-1, 1, HKV, D), V.view(-1, 1, HKV, D), SLOTS[POOL]


def from_slots() -> Any:
    table = draft_page_table_from_slots(
        SLOTS, CTX_LEN, window=2**31 - 1, page_size=P, req_pool_indices=POOL
    ).draft_table
    assert table.shape == TABLE.shape
    return K.flatten(0, 1).view(-1, P, HKV, D), V.flatten(0, 1).view(-1, P, HKV, D), table


LAYOUTS: dict[str, Any] = {
    "packed": packed,
    "pair first": lambda: (*torch.stack((K, V)), TABLE),
    "pair second": lambda: (*torch.stack((K, V), dim=1).unbind(1), TABLE),
    "heads first": lambda: (copied(K, 0, 2, 1, 3).transpose(1, 2), copied(V, 0, 2, 1, 3).transpose(1, 2), TABLE),
    "slots of one row": slots_of_one_row,
    "from slots": from_slots,
    "every P-th slot": lambda: (K, V, SLOTS[POOL, ::P] // P),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_engines(layout: str) -> None:
    # the block in the cache, so that rows of all layouts are read past the context too
    want = block_attention(Q, K, V, TABLE, CTX_LEN, block_causal=True)
    k, v, table = LAYOUTS[layout]()
    got = block_attention(Q, k, v, table, CTX_LEN, block_causal=True)
    assert want.lse.isfinite().all()
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=0 if "slot" not in layout else 1e-6)


def test_codes_kept_as_bytes() -> None:
    k, v = (x.to(torch.float8_e4m3fn) for x in (K, V))
    want = block_attention(Q, k.float(), v.float(), TABLE, CTX_LEN, k_scale=0.5, v_scale=2.0)
    k, v = (x.view(torch.uint8).view(torch.float8_e4m3fn) for x in (k, v))
    got = block_attention(Q, k, v, TABLE, CTX_LEN, k_scale=0.5, v_scale=torch.tensor(2.0))
    torch.testing.assert_close(got.out, want.out, rtol=1e-6, atol=1e-6)
