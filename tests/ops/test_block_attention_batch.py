"""What a request's result may depend on: nothing but itself. And what a call may cost: no sync, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmtp_kernels.ops.block_attention import reference as _reference
from tests.ops.block_attention_oracle import attend, paged

KERNEL_OPS = ("block_attention",)
reference: Any = _reference.block_attention
MODES: dict[str, dict[str, Any]] = {
    "mtp": {"block_causal": True},
    "drafter": {"window": 40},
    "query": {"window": 40, "window_ref": "query"},
    "capped": {"soft_cap": 2.0},
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(batch: int, heads: tuple[int, int], dim: int, slots: int, dense_rows: int | None, dtype: torch.dtype) -> Any:
    inputs, block = paged(
        torch.Generator().manual_seed(batch), batch=batch, slots=slots, heads=heads, dim=dim, pages=18, page_size=16,
        dense_rows=dense_rows, dtype=dtype,
    )  # fmt: skip
    ctx_len = torch.randint(0, 280, (batch,), generator=torch.Generator().manual_seed(1))
    return inputs[:4], ctx_len, block


# two threads once per shape: what they share does not depend on the mask
@pytest.mark.parametrize(("mode", "count"), [*((m, 1) for m in MODES), ("mtp", 2)])
@pytest.mark.parametrize(
    ("heads", "dim", "slots", "dense_rows", "dtype"),
    [
        ((6, 2), 32, 8, 8, torch.float32),
        ((6, 2), 32, 8, 9, torch.float32),
        ((1, 1), 3, 1, None, torch.float32),  # vectors end in scalar tails at every request
        ((5, 5), 17, 3, 3, torch.float64),
        ((8, 1), 64, 8, None, torch.bfloat16),
    ],
)
def test_row_059_same_bits_alone_and_in_a_batch(
    heads: tuple[int, int], dim: int, slots: int, dense_rows: int | None, dtype: torch.dtype, mode: str, count: int
) -> None:
    # https://github.com/openvinotoolkit/openvino/pull/38034: a bound taken from the longest row of the batch
    with threads(count):
        (q, k, v, table), ctx_len, block = make(32, heads, dim, slots, dense_rows, dtype)
        whole = attend(q, k, v, table, ctx_len, **block, **MODES[mode])
        for b in (0, 5, 31):
            one = {name: rows[b : b + 1].clone() for name, rows in block.items()}
            alone = attend(
                q[b : b + 1].clone(), k, v, table[b : b + 1].clone(), ctx_len[b : b + 1], **one, **MODES[mode]
            )
            assert torch.equal(alone.out[0], whole.out[b]) and torch.equal(alone.lse[0], whole.lse[b])


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_for_any_table_width_and_company(mode: str) -> None:
    # wider tables add masked tiles; other rows get longer, die or turn to NaN
    (q, k, v, table), ctx_len, block = make(4, (6, 2), 32, 8, 8, torch.float32)
    want = attend(q, k, v, table, ctx_len, **block, **MODES[mode])
    wide = torch.cat([table, torch.full((4, 60), -1)], dim=1)
    got = attend(q, k, v, wide, ctx_len, **block, **MODES[mode])
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    narrow = -(-int(ctx_len[2]) // 16)
    one = {name: rows[2:3] for name, rows in block.items()}
    got = attend(q[2:3], k, v, table[2:3, :narrow], ctx_len[2:3], **one, **MODES[mode])
    assert torch.equal(got.out[0], want.out[2])
    q[[0, 1, 3]] = float("nan")
    got = attend(q, k, v, table, torch.tensor([0, 288, int(ctx_len[2]), -1]), **block, **MODES[mode])
    assert torch.equal(got.out[2], want.out[2]) and torch.equal(got.lse[2], want.lse[2])


def test_dense_and_cached_blocks_give_the_same_bits() -> None:
    (q, k, v, table), _, _ = make(3, (6, 2), 32, 8, None, torch.float32)
    ctx_len = torch.tensor([280, 17, 64])
    rows = ctx_len[:, None] + torch.arange(8)
    page, offset = table.gather(1, rows // 16), rows % 16
    for mode in MODES.values():
        cached = attend(q, k, v, table, ctx_len, **mode)
        dense = attend(q, k, v, table, ctx_len, block_k=k[page, offset], block_v=v[page, offset], **mode)
        assert torch.equal(cached.out, dense.out) and torch.equal(cached.lse, dense.lse)


class Watch(TorchDispatchMode):
    """Records the largest tensor any operation returns and refuses those that read the device from the host."""

    SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert name not in self.SYNCS, f"{name} waits for the device"
        assert not (name.startswith("index") and any(self.is_mask(a) for a in args)), "a boolean index syncs"
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        is_view = func.is_view if hasattr(func, "is_view") else False
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not is_view:
                self.largest = max(self.largest, tensor.numel())
        return result

    @staticmethod
    def is_mask(index: Any) -> bool:
        if isinstance(index, (tuple, list)):
            return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
        return False


def watch(pages: int, **options: Any) -> Watch:
    inputs, block = paged(
        torch.Generator().manual_seed(0), batch=2, slots=8, heads=(4, 2), dim=8, pages=pages, page_size=16,
        dense_rows=8, spare=0,
    )  # fmt: skip
    q, k, v, table, ctx_len = inputs
    # the cache itself is the caller's: keep it small and the table long
    table = table % 8
    arguments = [options.get(n) for n in ("scale", "k_scale", "v_scale", "soft_cap", "sink")]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=q.dtype)
    rest = (None, options.get("window"), options.get("window_ref", "anchor"), True, None, *arguments)
    with Watch() as seen:
        reference(q, k[:8], v[:8], table, ctx_len + pages * 16, block["block_k"], block["block_v"], *rest, out, lse)
    return seen


@pytest.mark.parametrize("options", [{}, {"window": 512}, {"window": 512, "window_ref": "query"}], ids=str)
def test_no_sync_and_memory_independent_of_the_history(options: dict[str, Any]) -> None:
    # long contexts in one call: only the number of tiles may grow, and with a window not even that
    short, long = watch(64, **options), watch(1024, **options)
    assert long.largest == short.largest
    assert long.calls == short.calls if options else long.calls > short.calls
