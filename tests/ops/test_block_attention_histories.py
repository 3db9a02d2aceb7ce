"""Block attention against dense float64 masks: the window's edges and long histories, every unseen key poisoned.

The mask here is one boolean matrix over positions, written without the op, its reference or the other files' loops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.ops.block_attention_oracle import attend, check, paged

KERNEL_OPS = ("block_attention",)
SLOTS = 8
RULES: dict[str, dict[str, Any]] = {
    "full_causal": {"block_causal": True},
    "anchor": {"window_ref": "anchor"},
    "anchor_causal": {"window_ref": "anchor", "block_causal": True},
    "query": {"window_ref": "query"},
    "query_causal": {"window_ref": "query", "block_causal": True},
}
# of a page table's columns that no visible row needs
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


def mask_of(
    history: int, window: int | None = None, window_ref: str = "anchor", block_causal: bool = False
) -> torch.Tensor:
    """`[SLOTS, history + SLOTS]` bool, keys by position."""
    key = torch.arange(history + SLOTS)[None]
    query = history + torch.arange(SLOTS)[:, None]
    mask = (key <= query) | ~torch.tensor(block_causal)
    if window is None:
        return mask
    if window_ref == "anchor":
        return mask & (key >= history - window)
    return mask & ((key - query).abs() < window)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[S, Hq, D]`, k and v `[n, Hkv, D]` without poison -> out `[S, Hq, D]`, lse `[S, Hq]` in the dtype of q."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("shd,nhd->hsn", q, k) * q.shape[2] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hsn,nhd->shd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(0, 1)


def scattered(
    history: int, page_size: int, heads: tuple[int, int], dim: int, mask: torch.Tensor, dtype: torch.dtype
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Inputs of the op, pages in shuffled order, NaN in every key that no query sees and garbage in table entries
    that none needs; and q, k, v with keys in order of position and zeros for NaN."""
    generator = torch.Generator().manual_seed(history)
    total = history + SLOTS
    pages, spare = -(-total // page_size), 3
    q = torch.randn(SLOTS, heads[0], dim, generator=generator).to(dtype)
    order = torch.randperm(pages + spare, generator=generator)[:pages]
    seen = torch.zeros(pages * page_size, dtype=torch.bool)
    seen[:total] = mask.any(dim=0)
    dense, caches = [], []
    for _ in range(2):
        rows = torch.randn(pages * page_size, heads[1], dim, generator=generator).to(dtype)
        dense.append(rows[:total].masked_fill(~seen[:total, None, None], 0))
        cache = torch.full((pages + spare, page_size, heads[1], dim), float("nan"), dtype=dtype)
        cache[order] = rows.masked_fill(~seen[:, None, None], float("nan")).view(pages, page_size, heads[1], dim)
        caches.append(cache)
    needed = seen.view(pages, page_size).any(dim=1)
    garbage = torch.tensor(GARBAGE).repeat(-(-(pages + 4) // 4))[: pages + 4]
    table = torch.where(torch.cat([needed, torch.zeros(4, dtype=torch.bool)]), 0, garbage)
    table[:pages][needed] = order[needed]
    return (q[None], *caches, table[None].int(), torch.tensor([history])), (q, *dense)


def edges(window: int) -> tuple[int, ...]:
    return 0, 1, window - 1, window, window + 1, window + 15, 2 * window - 1, 20_000


def compare(
    histories: tuple[int, ...], page_size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, **options: Any
) -> None:
    """All histories together against the error budget: eager errs next to nothing on a history of one row."""
    found: list[list[torch.Tensor]] = [[] for _ in range(6)]
    for history in histories:
        mask = mask_of(history, **options)
        inputs, (q, k, v) = scattered(history, page_size, heads, dim, mask, dtype)
        got = attend(*inputs, **options)
        out, lse = eager(q.double(), k.double(), v.double(), mask)
        plain, accumulated = eager(q, k, v, mask)[0], eager(q.float(), k.float(), v.float(), mask)[1]
        for kept, one in zip(found, (got.out[0], out, plain, got.lse[0], lse, accumulated), strict=True):
            kept.append(one)
    whole = [torch.stack(kept) for kept in found]
    assert_within_budget(*whole[:3], name="out")
    assert_within_budget(*whole[3:], name="lse")


@pytest.mark.parametrize("rule", [r for r in RULES if r != "full_causal"])
@pytest.mark.parametrize(("window", "page_size"), [(64, 16), (64, 48), (4096, 16), (4096, 80)])
def test_histories_around_the_window(window: int, page_size: int, rule: str) -> None:
    # windows start and anchors lie in mid-page; 80 and 48 never divide the window
    compare(edges(window), page_size, (2, 1), 8, torch.float32, window=window, **RULES[rule])


def test_whole_histories() -> None:
    compare(edges(4096), 80, (2, 1), 8, torch.float32, window=None, block_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["full_causal", "anchor"])
def test_16_bit_caches_around_the_window(rule: str, dtype: torch.dtype) -> None:
    window = None if rule == "full_causal" else 64
    compare((0, 1, 63, 64, 65, 79, 127, 2000), 16, (4, 1), 64, dtype, window=window, **RULES[rule])


@pytest.mark.parametrize("history", [63, 64, 79, 1000])
def test_the_anchor_rule_shows_every_slot_the_same_keys(history: int) -> None:
    # the same query in all eight slots over the context alone: one answer, bit for bit
    (q, k, v, table, _), _ = paged(
        torch.Generator().manual_seed(history), batch=1, slots=SLOTS, heads=(2, 1), dim=16, pages=70, page_size=16
    )
    q = q[:, :1].expand_as(q).contiguous()
    none = torch.zeros(1, dtype=torch.int64)
    for options in ({"window": 64}, {"window": 64, "block_causal": True}, {}):
        got = attend(q, k, v, table, torch.tensor([history]), block_len=none, **options)
        assert torch.isfinite(got.lse).all()
        assert (got.out == got.out[:, :1]).all() and (got.lse == got.lse[:, :1]).all()
    # and not under the query rule
    lse = attend(q, k, v, table, torch.tensor([history]), block_len=none, window=64, window_ref="query").lse
    assert (lse[0, 1:, 0] < lse[0, :-1, 0]).all()


@pytest.mark.parametrize("dim", [48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 24])
def test_row_073_every_group_and_head_dim(group: int, dim: int) -> None:
    # https://github.com/ByteDance-Seed/Triton-distributed/issues/200: remainders of both at once
    kv_heads, page_size = ((1, 64), (2, 16))[(group + dim // 16) % 2]
    inputs, block = paged(
        torch.Generator().manual_seed(dim), batch=2, slots=4, heads=(group * kv_heads, kv_heads), dim=dim,
        pages=64 // page_size, page_size=page_size, dense_rows=4,
    )  # fmt: skip
    check(*inputs[:4], torch.tensor([53, 20]), **block, window=40)


@pytest.mark.parametrize(
    "page_size", [*range(1, 12), 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128, 129, 200, 255, 256]
)
def test_page_sizes_up_to_256(page_size: int) -> None:
    pages = -(-308 // page_size)
    inputs, _ = paged(
        torch.Generator().manual_seed(page_size), batch=2, slots=SLOTS, heads=(2, 1), dim=16, pages=pages,
        page_size=page_size,
    )  # fmt: skip
    ctx_len = torch.tensor([300, page_size + page_size // 2])
    check(*inputs[:4], ctx_len.clamp(max=300), window=100)
    check(*inputs[:4], ctx_len.clamp(max=300), block_causal=True)


@pytest.mark.parametrize("rule", ["full_causal", "anchor"])
def test_long_and_short_histories_in_one_batch(rule: str) -> None:
    # launched as on a GPU, where a lone request is split finer than one of 32; the table is as wide as the longest
    (q, k, v, table, _), block = paged(
        torch.Generator().manual_seed(5), batch=32, slots=2, heads=(4, 2), dim=16, pages=600, page_size=16,
        dense_rows=2, dtype=torch.bfloat16,
    )  # fmt: skip
    ctx_len = torch.randint(0, 40, (32,), generator=torch.Generator().manual_seed(6))
    ctx_len[[3, 31]] = torch.tensor([9599, 5000])
    options = RULES[rule] | ({"window": 6000} if rule == "anchor" else {})
    with planned_for(132):
        whole = attend(q, k, v, table, ctx_len, **block, **options)
        for b in (0, 3, 31):
            one = {name: rows[b : b + 1] for name, rows in block.items()}
            alone = attend(q[b : b + 1], k, v, table[b : b + 1], ctx_len[b : b + 1], **one, **options)
            assert torch.equal(alone.out[0], whole.out[b]) and torch.equal(alone.lse[0], whole.lse[b])


def test_the_mask_matrix_by_hand() -> None:
    # this file's own truth: a window of 2 before an anchor at 3, and of 2 keys a query
    assert mask_of(3, 2)[0].tolist() == [False, True, True] + [True] * 8
    assert mask_of(3, 2, "query", True)[1].tolist() == [False] * 3 + [True, True] + [False] * 6
    assert mask_of(3, 2, "query")[0].tolist() == [False, False, True, True, True] + [False] * 6
    assert mask_of(3, None, block_causal=True).sum(dim=1).tolist() == list(range(4, 12))


def test_the_backend_under_test_is_the_one_named(backend: str) -> None:
    assert backends.choose("block_attention", torch.device("cpu")) == backend
