"""Padded, shared and reused rows of a batch; lengths that change under a captured call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.draft_pages import draft_page_table
from dmtp_kernels.testing.capture import capture_safe
from tests.ops.block_attention_oracle import attend, check, paged

KERNEL_OPS = ("block_attention",)
NAN, INF = float("nan"), float("inf")
LIVE, PADDED = 5, 3


def batch_of(batch: int, dense_rows: int | None = 8, **change: Any) -> tuple[Any, dict[str, Any]]:
    shape: dict[str, Any] = {
        "slots": 8,
        "heads": (4, 2),
        "dim": 16,
        "pages": 12,
        "page_size": 16,
        "dtype": torch.float32,
    }
    return paged(torch.Generator().manual_seed(batch), batch=batch, dense_rows=dense_rows, **{**shape, **change})


@pytest.mark.parametrize("kind", ["zero_length", "negative_length", "largest_integers"])
@pytest.mark.parametrize("dense_rows", [None, 8])
def test_rows_093_146_155_padded_rows_are_inert(dense_rows: int | None, kind: str) -> None:
    # https://github.com/vllm-project/vllm/pull/43682, https://github.com/xLLM-AI/xllm/pull/1939 and
    # https://github.com/vllm-project/vllm/issues/41841: 5 requests in a batch of 8, padded rows full of poison
    (q, k, v, table, _), block = batch_of(LIVE + PADDED, dense_rows)
    ctx_len = torch.tensor([37, 5, 12, 0, 150] + [0] * PADDED)
    block_len, valid_from = torch.full((8,), 8), torch.tensor([3] * LIVE + [0] * PADDED)
    lens = {"block_len": block_len, "valid_from": valid_from}
    live = {n: t[:LIVE].clone() for n, t in (block | lens).items()}
    want = attend(q[:LIVE].clone(), k, v, table[:LIVE].clone(), ctx_len[:LIVE], **live, window=100)
    q[LIVE:] = NAN
    for rows in block.values():
        rows[LIVE:] = NAN
    if kind == "largest_integers":
        for values in (table, ctx_len, block_len, valid_from):
            values[LIVE:] = 2**63 - 1
    else:
        table[LIVE:], block_len[LIVE:] = -1, 0
        ctx_len[LIVE:] = 0 if kind == "zero_length" else -1
    got = attend(q, k, v, table, ctx_len, **block, **lens, window=100)
    assert torch.equal(got.out[:LIVE], want.out) and torch.equal(got.lse[:LIVE], want.lse)
    assert (got.out[LIVE:] == 0).all() and (got.lse[LIVE:] == -INF).all()


def test_row_091_a_poisoned_null_page_reaches_no_live_row() -> None:
    # https://github.com/sgl-project/sglang/issues/36207: padded rows of length 1 point to slot 0, which holds NaN
    (q, k, v, table, _), block = batch_of(4)
    ctx_len = torch.tensor([40, 1, 90, 1])
    want = attend(q, k, v, table, ctx_len, **block)
    null = int(table[1, 0])
    table[[1, 3]] = null
    k[null], v[null] = NAN, NAN
    got = attend(q, k, v, table, ctx_len, **block)
    assert torch.equal(got.out[[0, 2]], want.out[[0, 2]]) and torch.equal(got.lse[[0, 2]], want.lse[[0, 2]])


def test_row_059_the_shorter_request_has_the_longer_window() -> None:
    # https://github.com/openvinotoolkit/openvino/pull/38034: the window of 83 rows touches 5 pages, that of 160 rows 4
    (q, k, v, table, _), block = batch_of(2)
    ctx_len = torch.tensor([160, 83])
    both = check(q, k, v, table, ctx_len, **block, window=64)
    one = {name: rows[1:] for name, rows in block.items()}
    alone = attend(q[1:], k, v, table[1:], ctx_len[1:], **one, window=64)
    assert torch.equal(alone.out[0], both.out[1]) and torch.equal(alone.lse[0], both.lse[1])


def test_row_067_a_stale_page_shared_by_two_requests() -> None:
    # https://github.com/vllm-project/vllm/pull/53628: outside both windows, full of NaN
    (q, k, v, table, _), block = batch_of(2, pages=40)
    stale = int(table[0, 0])
    table[1, :3], table[0, :2] = stale, stale
    k[stale], v[stale] = NAN, NAN
    check(q, k, v, table, torch.tensor([600, 500]), **block, window=64)


def test_row_083_a_reused_prefix_through_the_draft_table() -> None:
    # https://github.com/weicj/vLLM-2080Ti-Definitive/pull/194: rows 0..31 have no drafter KV
    (q, k, v, table, _), block = batch_of(1)
    ctx_len, valid_from = torch.tensor([100]), torch.tensor([35])
    for cache in (k, v):
        cache[table[0, :2]] = NAN
        cache[table[0, 2], :3] = NAN
    want = check(q, k, v, table, ctx_len, **block, window=4096, valid_from=valid_from)
    pages = draft_page_table(table, ctx_len, window=4096, page_size=16, width=12, valid_from=valid_from)
    got = attend(q, k, v, pages.draft_table, pages.draft_len, valid_from=pages.kv_skip, **block)
    torch.testing.assert_close(got.out, want.out)


@pytest.mark.parametrize("dense_rows", [None, 8])
def test_rows_141_143_nothing_of_a_call_is_frozen(dense_rows: int | None, backend: str) -> None:
    # https://github.com/NVIDIA/TensorRT-LLM/pull/17110 and https://github.com/vllm-project/vllm/pull/48167: a replay
    # sees new lengths, tables and queries in the same buffers
    inputs, block = batch_of(3, dense_rows)
    ctx_len = torch.tensor([40, 0, 171])
    out, lse = torch.empty(3, 8, 4, 16), torch.empty(3, 8, 4)
    for step in range(3):
        with capture_safe(allocations=step == 0 or backend == "reference"):
            torch.ops.dmtp.block_attention_out(*inputs[:4], ctx_len, **block, window=64, out=out, lse=lse)
        want = check(*inputs[:4], ctx_len, **block, window=64)
        assert torch.equal(out, want.out) and torch.equal(lse, want.lse)
        ctx_len.add_(torch.tensor([3, 8, 1]))
        inputs[0].mul_(-0.5)
        inputs[3].copy_(inputs[3].roll(1, dims=0))


@pytest.mark.parametrize("window", [None, 20])
def test_row_082_a_prefix_hit_counts_its_rows_once(window: int | None) -> None:
    # https://github.com/Avarok-Cybersecurity/atlas/pull/693: prompt of 42, 32 of them cached, in pages that another
    # request used before: row 41 is the last one, not row 73
    (q, k, v, table, _), block = batch_of(2, page_size=16, pages=6)
    cold = check(q[:1], k, v, table[:1], torch.tensor([42]), **{n: t[:1] for n, t in block.items()}, window=window)
    hit = table[1].clone()
    hit[:2] = table[0, :2]  # the cached pages, shared
    for cache in (k, v):
        cache[hit[2:]] = 1e4  # the earlier occupant
        cache[hit[2], :10] = cache[table[0, 2], :10]
    pages = draft_page_table(hit[None], torch.tensor([42]), window=96 if window is None else window, page_size=16)
    one = {n: t[:1] for n, t in block.items()}
    got = attend(q[:1], k, v, hit[None], torch.tensor([42]), **one, window=window)
    assert torch.equal(got.out, cold.out) and torch.equal(got.lse, cold.lse)
    short = attend(q[:1], k, v, pages.draft_table, pages.draft_len, valid_from=pages.kv_skip, **one)
    torch.testing.assert_close(short.out, cold.out)
