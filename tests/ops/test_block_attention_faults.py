"""Field faults of paged attention: unread memory, empty rows, extreme scores, addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.block_attention_oracle import attend, check, paged

KERNEL_OPS = ("block_attention",)

NAN, INF = float("nan"), float("inf")
DETERMINISTIC: Any = torch.utils.deterministic


def lazy(elements: int) -> torch.Tensor:
    """Unwritten bf16 memory that the system commits only where it is touched."""
    before = DETERMINISTIC.fill_uninitialized_memory
    DETERMINISTIC.fill_uninitialized_memory = False
    try:
        return torch.empty(elements, dtype=torch.bfloat16)
    finally:
        DETERMINISTIC.fill_uninitialized_memory = before


def small(seed: int = 0, **change: Any) -> tuple[Any, dict[str, Any]]:
    shape: dict[str, Any] = {"batch": 4, "slots": 8, "heads": (2, 1), "dim": 4, "pages": 20, "page_size": 16}
    return paged(torch.Generator().manual_seed(seed), **{**shape, **change})


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 255, 256, 257, 4099])
def test_row_053_non_causal_lengths_off_the_tile(kv_len: int) -> None:
    # https://github.com/flashinfer-ai/flashinfer/issues/3716: pad lanes in the denominator when nothing is causal
    (q, k, v, table, _), block = small(batch=1, dim=8, pages=-(-kv_len // 16), dense_rows=8)
    k[table[0, -1], (kv_len - 1) % 16 + 1 :] = 1e4
    v[table[0, -1], (kv_len - 1) % 16 + 1 :] = 1e4
    got = check(torch.zeros_like(q), k, v, table, torch.tensor([kv_len]), **block)
    rows = torch.cat([v[table[0]].flatten(0, 1)[:kv_len], block["block_v"][0]])
    torch.testing.assert_close(got.out, rows.mean(dim=0).expand_as(got.out))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dense_rows", [None, 9])
def test_row_054_unread_slots_hold_poison(poison: float, dense_rows: int | None) -> None:
    # https://github.com/flashinfer-ai/flashinfer/issues/941: 0 * NaN from the unused slots of the last page
    (q, k, v, table, _), block = small(page_size=4, dense_rows=dense_rows)
    ctx_len, valid_from = torch.tensor([13, 0, 5, 70]), torch.tensor([2, 0, 5, 3])
    rows = dense_rows or 8
    block_len = torch.tensor([rows, 3, 1, rows - 2])
    clean = []
    for fill in (0.0, poison):
        for b in range(4):
            end = int(ctx_len[b]) + (0 if dense_rows else int(block_len[b]))
            for p in [*range(end, 80), *range(int(valid_from[b]))]:
                for cache in (k, v):
                    cache[table[b, p // 4], p % 4] = fill
            for rows_of in block.values():
                rows_of[b, int(block_len[b]) :] = fill
        options = {"valid_from": valid_from, "block_len": block_len, "block_causal": True}
        clean.append(attend(q, k, v, table, ctx_len, **block, **options))
    assert torch.isfinite(clean[1].out).all()
    assert torch.equal(clean[0].out, clean[1].out) and torch.equal(clean[0].lse, clean[1].lse)


def test_a_row_some_queries_do_not_see_is_unread_for_them() -> None:
    # causal block rows and the left edge of a query window: seen by later or earlier queries only
    (q, k, v, table, _), block = small(batch=1, dense_rows=8)
    block["block_v"][0, 5], block["block_k"][0, 5] = NAN, NAN
    got = attend(q, k, v, table, torch.tensor([20]), **block, block_causal=True)
    assert torch.isfinite(got.out[0, :5]).all() and got.out[0, 5:].isnan().all()

    (q, k, v, table, _), block = small(batch=1, dense_rows=8)
    v[table[0, 0], 14] = NAN  # position 14 = 20 + 3 - 9: the last query that sees it is slot 3
    got = attend(q, k, v, table, torch.tensor([20]), **block, window=10, window_ref="query")
    assert got.out[0, :4].isnan().all() and torch.isfinite(got.out[0, 4:]).all()


def test_a_visible_nan_is_not_laundered() -> None:
    (q, k, v, table, _), block = small(batch=2, dense_rows=8)
    v[table[0, 0], 3, 0, 2] = NAN
    got = attend(q, k, v, table, torch.tensor([20, 20]), **block)
    assert got.out[0, :, :, 2].isnan().all() and torch.isfinite(got.out[1]).all()


def test_row_055_no_finite_sentinel() -> None:
    # https://github.com/flashinfer-ai/flashinfer/issues/4450: visible scores below the mask's sentinel
    (_, k, v, table, _), _ = small(batch=1, dim=128, dtype=torch.float32)
    q, k = torch.full((1, 8, 2, 128), 100.0), torch.where(k.isnan(), k, -50.0)
    got = attend(q, k, v, table, torch.tensor([30]), block_causal=False)
    mean = v[table[0]].flatten(0, 1)[:38].mean(dim=0)
    torch.testing.assert_close(got.out, mean.expand_as(got.out))
    assert torch.isfinite(got.lse).all()
    empty = attend(q, k, v, table, torch.tensor([0]), block_len=torch.tensor([0]))
    assert (empty.out == 0).all() and (empty.lse == -INF).all()


@pytest.mark.parametrize("mode", ["causal_in_cache", "dense"])
def test_row_057_zero_length_history(mode: str) -> None:
    # https://github.com/flashinfer-ai/flashinfer/pull/4975: rows of length 0 keep what the buffer held
    dense_rows = 8 if mode == "dense" else None
    inputs, block = small(dense_rows=dense_rows)
    ctx_len = torch.tensor([0, 5, 0, 130])
    dead = torch.tensor([0, 8, 0, 8])
    out, lse = torch.full((4, 8, 2, 4), NAN), torch.full((4, 8, 2), NAN)
    options: dict[str, Any] = {"block_causal": mode != "dense"}
    inputs[0][[0, 2]] = NAN  # a padded row's query is garbage too
    torch.ops.dmtp.block_attention_out(*inputs[:4], ctx_len, **block, block_len=dead, **options, out=out, lse=lse)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -INF).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[[1, 3]]).all()
    inputs, block = small(dense_rows=dense_rows)
    check(*inputs[:4], ctx_len, **block, **options)  # history 0, block present: the block alone


def test_row_058_context_shorter_than_the_block() -> None:
    # https://github.com/flashinfer-ai/flashinfer/pull/3360: fewer keys than queries
    for total in range(1, 9):
        inputs, block = small(batch=1, dense_rows=8)
        options: dict[str, Any] = {"block_len": torch.tensor([total]), "window": 4096}
        check(*inputs[:4], torch.tensor([0]), **block, **options)
        check(*inputs[:4], torch.tensor([0]), **block, **options, block_causal=True)


def test_row_065_masks_are_per_call() -> None:
    # https://github.com/vllm-project/vllm/pull/56692: one layer's window leaked into the others
    inputs, block = small(dense_rows=8)
    ctx_len = torch.tensor([40, 3, 100, 64])
    for window in (16, 16, None, 16, None):
        check(*inputs[:4], ctx_len, **block, window=window)


@pytest.mark.parametrize("poison", [1e4, NAN])
def test_rows_066_079_rows_at_and_after_the_anchor_are_no_context(poison: float) -> None:
    # https://github.com/sgl-project/SpecForge/issues/470 and https://github.com/vllm-project/vllm-ascend/pull/14883:
    # visibility by index, and a length that still counts rejected rows
    (q, k, v, table, _), block = small(batch=1, dense_rows=8)
    anchor = 49
    want = attend(q, k, v, table, torch.tensor([anchor]), **block)
    for cache in (k, v):
        for p in range(anchor, 320):
            cache[table[0, p // 16], p % 16] = poison
    got = attend(q, k, v, table, torch.tensor([anchor]), **block)
    assert torch.equal(got.out, want.out)


def test_row_071_group_24_does_not_bleed() -> None:
    # https://github.com/vllm-project/vllm/pull/40792
    (q, k, v, table, _), _ = small(batch=1, heads=(48, 2))
    v[:, :, 0], v[:, :, 1] = 0, 1
    out = attend(q, k, v, table, torch.tensor([20])).out
    assert (out[:, :, :24] == 0).all()
    torch.testing.assert_close(out[:, :, 24:], torch.ones_like(out[:, :, 24:]))


@pytest.mark.parametrize("layout", ["rows_first", "heads_first"])
def test_row_074_page_times_stride_past_int32(layout: str) -> None:
    # https://github.com/vllm-project/vllm/pull/47671: page 16,384 x stride 131,072 = 2^31
    cache = lazy(16385 * 131072).view(16385, 64, 8, 256)
    if layout == "heads_first":
        cache = cache.view(16385, 8, 64, 256).transpose(1, 2)
    k, v = cache.split(128, dim=-1)
    q = torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16)
    for page, value in ((16383, 2.0), (16384, 3.0)):
        k[page], v[page] = 1.0, value
    table = torch.tensor([[16383], [16384]], dtype=torch.int32)
    out = attend(q, k, v, table, torch.tensor([63, 63])).out
    assert (out[0] == 2).all() and (out[1] == 3).all()


@pytest.mark.parametrize("page", [32767, 32768])
def test_row_074_the_reported_page(page: int) -> None:
    # page 64, 8 heads of 128: a stride of 65,536 passes 2^31 at page 32,768; 32,767 is the control
    cache = lazy(32769 * 65536).view(32769, 64, 8, 128)
    cache[page], cache[0] = 3.0, NAN
    q = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    out = attend(q, cache, cache, torch.tensor([[page]], dtype=torch.int32), torch.tensor([63])).out
    assert (out == 3).all()


def test_row_075_page_ids_past_16_bits() -> None:
    # https://github.com/ROCm/ATOM/issues/702
    cache = torch.zeros(65538, 16, 1, 8, dtype=torch.bfloat16)
    for page in (0, 65535, 65536, 65537):
        cache[page] = page % 65530 + 1
    table = torch.tensor([[65535], [65536], [65537]], dtype=torch.int32)
    out = attend(torch.zeros(3, 1, 1, 8, dtype=torch.bfloat16), cache, cache, table, torch.tensor([15, 15, 15])).out
    assert out[:, 0, 0, 0].tolist() == [6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_row_179_query_rows_past_int32(dtype: torch.dtype) -> None:
    # https://github.com/sgl-project/sglang/issues/20389: row stride 2^28, nine rows, either index dtype
    q = lazy(8 * 2**28 + 64).as_strided((9, 1, 2, 4), (2**28, 8, 4, 1))
    (small_q, k, v, table, _), block = small(batch=9, slots=1, pages=2, dense_rows=1, dtype=torch.bfloat16)
    q.copy_(small_q)
    ctx_len = torch.arange(9, dtype=dtype)
    got = attend(q, k, v, table.to(dtype), ctx_len, **block)
    want = attend(small_q, k, v, table, ctx_len, **block)
    assert torch.equal(got.out, want.out)


def test_row_077_a_row_that_does_not_fit_its_table_is_refused() -> None:
    # https://github.com/sgl-project/sglang/pull/35985: published length beyond the table; guards around the table stay
    inputs, _ = small(batch=3, pages=8)
    wide = torch.full((3, 10), 2**30, dtype=torch.int64)
    wide[:, 1:9] = inputs[3]
    ctx_len = torch.tensor([120, 121, 2**40])
    got = attend(*inputs[:3], wide[:, 1:9], ctx_len)
    assert torch.isfinite(got.out).all() and torch.isfinite(got.lse[0]).all()
    assert (got.out[1:] == 0).all() and (got.lse[1:] == -INF).all()
    # with the block passed dense only the context must fit
    (q, k, v, table, _), block = small(batch=3, pages=8, dense_rows=8)
    lse = attend(q, k, v, table, torch.tensor([120, 128, 129]), **block).lse
    assert torch.isfinite(lse[:2]).all() and (lse[2] == -INF).all()


@pytest.mark.parametrize("garbage", [-1, -(2**31), 2**31 - 1])
def test_stale_table_entries_are_never_followed(garbage: int) -> None:
    # engines leave old ids in the tail of a row, and -1 or 0 in evicted pages
    (q, k, v, table, _), block = small(dense_rows=8)
    ctx_len = torch.tensor([0, 16, 17, 200])
    want = attend(q, k, v, table, ctx_len, **block, window=30)
    for b in range(4):
        last, first = -(-int(ctx_len[b]) // 16), max(int(ctx_len[b]) - 30, 0) // 16
        table[b, last:], table[b, :first] = garbage, garbage
    got = attend(q, k, v, table.to(torch.int32), ctx_len, **block, window=30)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    # an unmapped page inside the range hides its rows
    table[3, 11] = garbage
    hidden = attend(q, k, v, table, ctx_len, **block, window=30)
    assert torch.isfinite(hidden.out).all() and (hidden.lse[3] < got.lse[3]).all()


@pytest.mark.parametrize("pages", [0, 3])
def test_no_pages_or_no_columns(pages: int) -> None:
    inputs, block = small(pages=3, dense_rows=8)
    table, caches = inputs[3][:, :0] if pages else inputs[3], [c[:pages] for c in inputs[1:3]]
    got = attend(inputs[0], *caches, table, torch.tensor([0, 0, 1, -1]), **block)
    assert torch.isfinite(got.out).all() and torch.isfinite(got.lse[:2]).all()
    assert (got.lse[2:] == -INF).all()


def test_row_175_empty_batch_and_no_slots() -> None:
    # https://github.com/triton-lang/triton-ascend/issues/984: a grid of size zero
    inputs, block = small(dense_rows=8)
    none = [t[:0] for t in inputs]
    got = attend(
        none[0], inputs[1], inputs[2], none[3], none[4], block_k=block["block_k"][:0], block_v=block["block_v"][:0]
    )
    assert got.out.shape == (0, 8, 2, 4) and got.lse.shape == (0, 8, 2)
    assert attend(inputs[0][:, :0], *inputs[1:]).out.shape == (4, 0, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000], ids=["nan", "full", "memset", "inf"])
def test_a_scale_reaches_the_queries_that_see_the_cache(bits: int, dtype: torch.dtype) -> None:
    # unset factors of a fresh request, and NaN of any bits, which rounding to 16 bits may not turn into a number
    cache = torch.ones(2, 16, 1, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    one = torch.ones(1, 4, 1, 32, dtype=dtype)
    table = torch.tensor([[0, 1]])

    def run(history: int, **options: Any) -> torch.Tensor:
        fixed = {"k_scale": torch.tensor(1.0), "v_scale": scale, "block_k": one, "block_v": one}
        out: torch.Tensor = attend(one, cache, cache, table, torch.tensor([history]), **fixed, **options).out
        return out[0, :, 0, 0]

    assert run(0).tolist() == [1] * 4 and run(9, window=0).tolist() == [1] * 4
    ragged = run(5, window=2, window_ref="query", block_causal=True)
    assert ragged[1:].tolist() == [1] * 3 and not ragged[0].isfinite()
    assert not run(5).isfinite().any() and not run(5, block_len=torch.tensor([0])).isfinite().any()


def test_equal_rows_by_the_thousand_keep_their_value() -> None:
    # one long chain of fp32 sums drifts
    k = torch.zeros(200, 16, 1, 16)
    v = torch.full((200, 16, 1, 16), 0.6)
    table = torch.arange(200)[None]
    got = attend(torch.zeros(1, 1, 1, 16), k, v, table, torch.tensor([3199]))
    torch.testing.assert_close(got.out, torch.full_like(got.out, 0.6), rtol=8e-6, atol=0)
