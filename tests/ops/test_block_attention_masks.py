"""Which keys each query sees: the window's edges, its two references, and where the history starts.

With q = 0 every visible key weighs the same: `exp(lse)` counts the keys and the means of p and p^2 over them identify
the set: one key more or less changes them by more than `CLOSE`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.draft_pages import draft_page_table
from tests.ops.block_attention_oracle import attend, check, paged, visible

KERNEL_OPS = ("block_attention",)
SLOTS = 8
CLOSE = 1e-5


def marked(
    history: int, page_size: int, *, extra: int = SLOTS, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V caches whose V row of position p is `[p, p^2 / 1e3]`, in shuffled pages, NaN in rows without position."""
    pages = -(-(history + extra) // page_size)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(history)).view(1, pages)
    position = torch.arange(pages * page_size, dtype=dtype)
    position[history + extra :] = float("nan")
    v = torch.empty(pages, page_size, 1, 2, dtype=dtype)
    v[table[0]] = torch.stack([position, position**2 / 1e3], dim=-1).view(pages, page_size, 1, 2)
    k = torch.where(v.isnan(), v, 1.0)
    return k, v, table


def assert_sees(got: Any, mask: Any) -> None:
    position = torch.arange(mask.shape[1], dtype=torch.float64)
    for s, row in enumerate(torch.from_numpy(mask)):
        keys = position[row]
        assert got.lse[0, s, 0].exp().item() == pytest.approx(len(keys), rel=CLOSE)
        if len(keys):
            want = [keys.mean().item(), (keys**2).mean().item() / 1e3]
            assert got.out[0, s, 0].tolist() == pytest.approx(want, rel=CLOSE)


def run(history: int, page_size: int, **options: Any) -> Any:
    k, v, table = marked(history, page_size)
    q = torch.zeros(1, SLOTS, 1, 2)
    return attend(q, k, v, table, torch.tensor([history]), **options)


@pytest.mark.parametrize("rule", ["anchor", "query", "query_causal"])
@pytest.mark.parametrize(("window", "page_size"), [(64, 16), (64, 1), (64, 48), (4096, 64)])
def test_row_062_window_edges(window: int, page_size: int, rule: str) -> None:
    # https://github.com/vllm-project/vllm/pull/2231: the window starts in mid-page. Lengths around 1x and 2x the window
    for history in (0, 1, window - 1, window, window + 1, window + 15, 2 * window - 1):
        options: dict[str, Any] = {"window": window, "window_ref": rule.split("_")[0]}
        options["block_causal"] = rule.endswith("causal")
        assert_sees(run(history, page_size, **options), visible(history, SLOTS, SLOTS, **options))


@pytest.mark.parametrize("window", [64, 4096])
def test_row_067_fully_masked_tiles(window: int) -> None:
    # https://github.com/vllm-project/vllm/pull/53628: the first tiles hold no visible key; their pages are NaN here
    history, page_size = 20_000, 16
    k, v, table = marked(history, page_size)
    stale = table[0, : (history - window) // page_size]
    k[stale], v[stale] = float("nan"), float("nan")
    q = torch.zeros(1, SLOTS, 1, 2)
    valid_from = torch.tensor([history - window])
    windowed = attend(q, k, v, table, torch.tensor([history]), window=window)
    assert_sees(windowed, visible(history, SLOTS, SLOTS, window=window))
    # the same set through the other door, where all tiles before the last are masked
    skipped = attend(q, k, v, table, torch.tensor([history]), valid_from=valid_from)
    torch.testing.assert_close(skipped.out, windowed.out)


def test_row_061_window_counts_exactly_w_keys() -> None:
    # https://github.com/huggingface/transformers/issues/39408: W keys before slot 0, the same for all eight queries
    history, window = 5000, 4096
    k, v, table = marked(history, 16)
    q = torch.zeros(1, SLOTS, 1, 2)
    for key, seen in [(history - window, True), (history - window - 1, False)]:
        v.zero_()
        v[table[0, key // 16], key % 16] = 1
        out = attend(q, k, v, table, torch.tensor([history]), window=window).out
        assert ((out > 0) == seen).all()


def test_row_063_the_anchor_window_never_cuts_the_block() -> None:
    # https://github.com/NVIDIA/TensorRT-LLM/pull/17935: slot 0 sees slot 7, also where W is shorter than the block
    for window in (3, 4096):
        got = run(40, 16, window=window)
        assert_sees(got, visible(40, SLOTS, SLOTS, window=window))
        assert got.lse[0, 0, 0].exp().item() == pytest.approx(min(window, 40) + SLOTS, rel=CLOSE)


@pytest.mark.parametrize("causal", [True, False])
def test_the_query_window_is_flash_attentions(causal: bool) -> None:
    # left W-1, right 0 or W-1, over context and block alike
    window, history = 5, 40
    position = history + torch.arange(SLOTS)[:, None]
    keys = torch.arange(history + SLOTS)
    mask = (keys >= position - (window - 1)) & (keys <= position + (0 if causal else window - 1))
    got = run(history, 16, window=window, window_ref="query", block_causal=causal)
    assert_sees(got, mask.numpy())


def test_public_window_rules_are_all_expressible() -> None:
    # two of the five public rules that are not one argument: speculators' and SGLang's page-rounded compact table
    history, window, page_size = 100, 33, 16
    got = run(history, page_size, window=window, block_causal=True)
    assert_sees(got, visible(history, SLOTS, SLOTS, window=window, block_causal=True))
    rounded = (history - window) // page_size * page_size
    got = run(history, page_size, valid_from=torch.tensor([rounded]))
    assert_sees(got, visible(history, SLOTS, SLOTS, valid_from=rounded))


def test_row_081_window_none_zero_and_negative_differ() -> None:
    # https://github.com/EricLBuehler/mistral.rs/issues/2094: a window that is silently ignored
    history, window = 600, 512
    k, v, table = marked(history, 16)
    v[table[0, :5]] = 1e3
    v[table[0, 5], :8] = 1e3
    q = torch.zeros(1, SLOTS, 1, 2)
    out = attend(q, k, v, table, torch.tensor([history]), window=window, block_causal=True).out
    assert out[0, 0, 0, 0].item() == pytest.approx((88 + 600) / 2, rel=CLOSE)
    counts = [run(history, 16, window=w).lse.exp()[0, 0, 0].item() for w in (None, 0)]
    assert counts == pytest.approx([608, 8], rel=CLOSE)
    with pytest.raises(ValueError, match="window: is -1"):
        run(history, 16, window=-1)


def test_row_083_rows_before_valid_from_were_never_written() -> None:
    # https://github.com/weicj/vLLM-2080Ti-Definitive/pull/194: a reused prefix has no drafter KV
    history, valid_from = 100, 32
    k, v, table = marked(history, 16)
    k[table[0, :2]], v[table[0, :2]] = float("nan"), float("nan")
    q = torch.zeros(1, SLOTS, 1, 2)
    for window in (None, 4096, 80, 20):
        options: dict[str, Any] = {"window": window, "block_causal": True}
        got = attend(q, k, v, table, torch.tensor([history]), valid_from=torch.tensor([valid_from]), **options)
        assert_sees(got, visible(history, SLOTS, SLOTS, valid_from=valid_from, **options))


def test_row_085_many_tokens_a_step_see_what_single_steps_see() -> None:
    # https://github.com/ml-explore/mlx-lm/issues/1914: a trim that assumes one token per call
    history = 0
    for step in (1, 8, 3, 8):
        history += step
        assert_sees(run(history, 4, window=16), visible(history, SLOTS, SLOTS, window=16))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rule", ["anchor", "query"])
def test_draft_table_sees_the_same_keys_as_the_full_table(rule: str, page_size: int) -> None:
    window = 24
    for history in (1, 23, 24, 25, 39, 100, 128):
        k, v, table = marked(history, page_size)
        q = torch.zeros(1, SLOTS, 1, 2)
        pages = draft_page_table(table, torch.tensor([history]), window=window, page_size=page_size, block_slots=SLOTS)
        options: dict[str, Any] = {"window": window, "window_ref": rule} if rule == "query" else {}
        got = attend(q, k, v, pages.draft_table, pages.draft_len, valid_from=pages.kv_skip, **options)
        assert_sees(got, visible(history, SLOTS, SLOTS, window=window, window_ref=rule))


def test_row_070_positions_stay_absolute() -> None:
    # https://github.com/spiritbuun/buun-llama-cpp/issues/32: the window moves no rotary position
    def rope(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position.double()[..., None, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).to(x.dtype)

    g = torch.Generator().manual_seed(3)
    history, window, page_size = 1000, 256, 16
    (q, k, v, table, _), block = paged(
        g, batch=1, slots=SLOTS, heads=(2, 1), dim=4, pages=63, page_size=page_size, dense_rows=SLOTS
    )
    rows = torch.arange(63 * page_size).view(63, page_size)
    k[table[0]] = rope(k[table[0]], rows)
    here = history + torch.arange(SLOTS)[None]
    q, block["block_k"] = rope(q, here), rope(block["block_k"], here)
    ctx_len = torch.tensor([history])
    full = check(q, k, v, table, ctx_len, **block, window=window)
    pages = draft_page_table(table, ctx_len, window=window, page_size=page_size)
    short = attend(q, k, v, pages.draft_table, pages.draft_len, valid_from=pages.kv_skip, **block)
    torch.testing.assert_close(short.out, full.out)


def test_an_infinite_query_meets_no_unread_row_under_a_soft_cap() -> None:
    k, v, table = marked(9, 16)
    q = torch.zeros(1, SLOTS, 1, 2)
    q[0, 3, 0, 1] = float("-inf")  # its scores are -cap, those of the others 0: all keys weigh the same
    got = attend(q, k, v, table, torch.tensor([9]), soft_cap=2.0)
    mask = visible(9, SLOTS, SLOTS)
    got.lse[0, 3] += 2.0
    assert_sees(got, mask)
