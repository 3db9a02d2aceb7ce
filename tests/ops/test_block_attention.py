"""Block attention against a dense boolean mask, over layouts, options and dtypes; its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.block_attention import block_attention
from tests.ops.block_attention_oracle import attend, check, oracle, paged

KERNEL_OPS = ("block_attention",)
MODES: dict[str, dict[str, Any]] = {
    "mtp": {"block_causal": True},
    "drafter": {"window": 11},
    "anchor_causal": {"window": 11, "block_causal": True},
    "query_causal": {"window": 11, "window_ref": "query", "block_causal": True},
    "query_both_ways": {"window": 11, "window_ref": "query"},
    "query_shorter_than_block": {"window": 3, "window_ref": "query"},
    "no_context": {"window": 0},
    "query_nothing": {"window": 0, "window_ref": "query"},
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dense_rows", [None, 8, 9], ids=["in_cache", "dense", "pending_row"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_match_the_dense_mask(mode: str, dense_rows: int | None) -> None:
    # every mask rule x every place the block can be, at histories around the window and the tile
    inputs, block = paged(
        generator(), batch=8, slots=8, heads=(4, 2), dim=8, pages=18, page_size=16, dense_rows=dense_rows
    )
    ctx_len = torch.tensor([0, 1, 10, 11, 12, 100, 256, 280])
    check(*inputs[:4], ctx_len, **block, **MODES[mode])


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (10, 2), (6, 1), (7, 1), (16, 2), (24, 2), (4, 4)], ids=str)
def test_any_group(heads: tuple[int, int]) -> None:
    inputs, block = paged(generator(), batch=2, slots=3, heads=heads, dim=4, pages=3, page_size=4, dense_rows=3)
    check(*inputs[:4], torch.tensor([7, 12]), **block)


@pytest.mark.parametrize("dim", [1, 3, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_row_073_head_dims_and_page_sizes(dim: int, page_size: int) -> None:
    # https://github.com/ByteDance-Seed/Triton-distributed/issues/200: the branch for odd head dims was never run
    pages = -(-40 // page_size)
    inputs, _ = paged(generator(), batch=2, slots=4, heads=(6, 1), dim=dim, pages=pages, page_size=page_size)
    check(*inputs[:4], torch.tensor([36, 17]), block_causal=True)


@pytest.mark.parametrize("slots", [1, 2, 70, 130])
@pytest.mark.parametrize("mode", ["mtp", "query_causal", "query_both_ways"])
def test_long_blocks(slots: int, mode: str) -> None:
    # more block rows than one tile holds: a prefill chunk through the same op
    inputs, block = paged(
        generator(), batch=2, slots=slots, heads=(2, 1), dim=8, pages=5, page_size=16, dense_rows=slots + 1
    )
    check(*inputs[:4], torch.tensor([80, 3]), **block, **MODES[mode])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_accumulates_in_fp32(dtype: torch.dtype) -> None:
    inputs, block = paged(
        generator(), batch=2, slots=8, heads=(4, 2), dim=64, pages=40, page_size=16, dense_rows=8, dtype=dtype
    )
    got = check(*inputs[:4], torch.tensor([600, 333]), **block, window=512)
    assert got.out.dtype == dtype and got.lse.dtype == torch.float32


@pytest.mark.parametrize("scales", ["float", "scalar", "one", "heads", "rows"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_caches_with_every_scale_shape(dtype: torch.dtype, scales: str) -> None:
    (q, k, v, table, _), block = paged(
        generator(), batch=3, slots=4, heads=(4, 2), dim=16, pages=3, page_size=8, dense_rows=4, dtype=torch.float32
    )
    shape: Any = {"scalar": (), "one": (1,), "heads": (2,), "rows": (3, 2)}.get(scales)
    factors = [0.5, 2.0] if shape is None else [torch.rand(shape, generator=generator(s)) + 0.5 for s in (1, 2)]
    check(q, k.to(dtype), v.to(dtype), table, torch.tensor([20, 0, 9]), **block, k_scale=factors[0], v_scale=factors[1])


def test_fp8_passes_opcheck() -> None:
    # the schema utility cannot compare fp8 inputs, so the spec holds no such case
    (q, k, v, table, ctx_len), _ = paged(generator(), batch=2, slots=2, heads=(2, 1), dim=16, pages=2, page_size=8)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    options = {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}
    utilities = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.dmtp.block_attention.default, (q.float(), k, v, table, ctx_len), options, test_utils=utilities
    )


@pytest.mark.parametrize("layout", ["packed", "head_major", "padded_pages", "one_buffer"])
def test_strided_views(layout: str) -> None:
    # vLLM packs K and V, keeps heads before rows and may pad pages; SGLang's K and V can be halves of one buffer
    (q, k, v, table, _), _ = paged(generator(), batch=2, slots=4, heads=(4, 2), dim=8, pages=3, page_size=8)
    if layout == "packed":
        k, v = torch.cat([k, v], dim=-1).split(8, dim=-1)
    elif layout == "head_major":
        k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v))
    elif layout == "padded_pages":
        k, v = (torch.cat([c, torch.full_like(c[:, :1], float("nan"))], dim=1)[:, :8] for c in (k, v))
    else:
        k, v = torch.stack([k, v]).unbind()
    wide_q = torch.full((2, 4, 5, 9), float("nan"), dtype=q.dtype)
    wide_q[:, :, :4, :8] = q
    wide_table = torch.full((2, 9), -5, dtype=torch.int32)
    wide_table[:, :3] = table
    got = check(wide_q[:, :, :4, :8], k, v, wide_table[:, :3], torch.tensor([20, 5], dtype=torch.int32))
    assert torch.isfinite(got.out).all()


def test_soft_cap_sink_and_scale() -> None:
    inputs, block = paged(generator(), batch=2, slots=3, heads=(4, 2), dim=8, pages=3, page_size=8, dense_rows=3)
    ctx_len, sink = torch.tensor([24, 0]), torch.tensor([0.0, -3.0, 5.0, float("-inf")], dtype=torch.float64)
    for options in ({"soft_cap": 1.5}, {"sink": sink}, {"scale": 2.0}, {"soft_cap": 0.7, "sink": sink, "scale": 0.1}):
        check(*inputs[:4], ctx_len, **block, **options)
    # an empty set stays empty: the sink has no value row
    empty = check(*inputs[:4], ctx_len, **block, sink=sink, window=0, block_len=torch.tensor([0, 3]))
    assert (empty.out[0] == 0).all() and (empty.lse[0] == float("-inf")).all()


def test_context_and_block_merge_by_their_lse() -> None:
    # what a split kernel or a caller with two caches relies on
    inputs, block = paged(generator(), batch=2, slots=4, heads=(2, 1), dim=8, pages=4, page_size=8, dense_rows=4)
    ctx_len, none = torch.tensor([30, 5]), torch.zeros(2, dtype=torch.int64)
    whole = attend(*inputs[:4], ctx_len, **block)
    parts = [
        attend(*inputs[:4], ctx_len, **block, block_len=none),
        attend(*inputs[:4], none, **block),
    ]
    weight = [torch.exp(p.lse - whole.lse)[..., None] for p in parts]
    torch.testing.assert_close(parts[0].out * weight[0] + parts[1].out * weight[1], whole.out)
    torch.testing.assert_close(weight[0] + weight[1], torch.ones_like(weight[0]))


@pytest.mark.parametrize("seed", range(12))
def test_random_mixtures(seed: int) -> None:
    # combinations nobody thought of, with dead rows and partly valid blocks among live ones
    g = generator(100 + seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=g))]

    slots, page_size, pages = pick(1, 2, 5, 8), pick(1, 2, 7, 16), pick(5, 20)
    dense_rows = pick(None, slots, slots + 1, slots + 4)
    inputs, block = paged(
        g, batch=6, slots=slots, heads=pick((2, 2), (6, 2), (5, 1)), dim=pick(4, 7), pages=pages,
        page_size=page_size, dense_rows=dense_rows,
    )  # fmt: skip
    rows = dense_rows or slots
    limit = pages * page_size - (slots if dense_rows is None else 0)
    if limit < 0:
        pytest.skip("the block does not fit the table")
    options: dict[str, Any] = {
        "window": pick(None, 0, 1, 5, 30),
        "window_ref": pick("anchor", "query"),
        "block_causal": pick(True, False),
        "valid_from": torch.randint(-3, limit + 3, (6,), generator=g),
        "block_len": torch.randint(0, rows + 1, (6,), generator=g),
    }
    ctx_len = torch.randint(-1, limit + 1, (6,), generator=g)
    options["block_len"][ctx_len < 0] = 0
    check(*inputs[:4], ctx_len, **block, **options)


def test_inputs_are_left_alone() -> None:
    # the reference cuts poison in place: never in the caller's tensors
    inputs, block = paged(generator(), batch=2, slots=3, heads=(2, 1), dim=4, pages=2, page_size=8, dense_rows=4)
    tensors = [*inputs, *block.values()]
    before = [t.clone() for t in tensors]
    attend(*inputs, **block, block_len=torch.tensor([1, 0]), block_causal=True)
    for now, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(now, old, rtol=0, atol=0, equal_nan=True)


def test_inputs_that_require_grad_are_served() -> None:
    # a model called outside no_grad: in-place and out= operations must not trip over autograd
    inputs, block = paged(generator(), batch=2, slots=3, heads=(2, 1), dim=4, pages=2, page_size=8, dense_rows=4)
    want = attend(*inputs, **block)
    got = attend(inputs[0].requires_grad_(), *inputs[1:], **{n: t.requires_grad_() for n, t in block.items()})
    assert torch.equal(got.out, want.out)


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "window": ({"window": -1}, ValueError, "window: is -1"),
    "window_ref": ({"window_ref": "left"}, ValueError, "window_ref: is 'left'"),
    "heads": ({"q": torch.zeros(2, 3, 3, 4)}, ValueError, "q: has 3 heads"),
    "dim": ({"q": torch.zeros(2, 3, 2, 5)}, ValueError, "k_cache: dimension 3"),
    "cache_dtype": ({"k_cache": torch.zeros(4, 8, 2, 4).half()}, TypeError, "k_cache: dtype"),
    "cache_pair": ({"v_cache": torch.zeros(4, 7, 2, 4)}, ValueError, "v_cache: dimension 1"),
    "page_table": ({"page_table": torch.zeros(2, 2)}, TypeError, "page_table: dtype"),
    "ctx_len": ({"ctx_len": torch.zeros(3, dtype=torch.int64)}, ValueError, "ctx_len: dimension 0"),
    "half_a_block": ({"block_k": torch.zeros(2, 3, 2, 4)}, ValueError, "block_v: is None"),
    "short_block": (
        {"block_k": torch.zeros(2, 2, 2, 4), "block_v": torch.zeros(2, 2, 2, 4)},
        ValueError,
        "block_k: has 2 rows",
    ),
    "block_len": ({"block_len": torch.zeros(2)}, TypeError, "block_len: dtype"),
    "scale": ({"scale": float("nan")}, ValueError, "scale: is nan"),
    "soft_cap": ({"soft_cap": 0.0}, ValueError, "soft_cap: is 0.0"),
    "sink": ({"sink": torch.zeros(3)}, ValueError, "sink: dimension 0"),
    "fp8_scale": ({"k_cache": torch.zeros(4, 8, 2, 4).to(torch.float8_e5m2)}, ValueError, "k_scale: is None"),
    "scale_shape": ({"v_scale": torch.zeros(3)}, ValueError, "v_scale: shape"),
    "stride": ({"q": torch.zeros(2, 3, 4, 2).transpose(2, 3)}, ValueError, "q: last dimension"),
    "device": ({"sink": torch.zeros(2, device="meta")}, ValueError, "sink: is on meta"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_argument(case: str) -> None:
    change, error, message = REFUSALS[case]
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 3, 2, 4),
        "k_cache": torch.zeros(4, 8, 2, 4),
        "v_cache": torch.zeros(4, 8, 2, 4),
        "page_table": torch.zeros(2, 2, dtype=torch.int64),
        "ctx_len": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        attend(**{**arguments, **change})


def test_oracle_against_a_sum_by_hand() -> None:
    # the oracle itself: two keys, weights 3/4 and 1/4
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([3.0, 1.0]).log().view(1, 2, 1, 1)
    v, none = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1), torch.zeros(1, dtype=torch.int64)
    out, lse = oracle(q, k, v, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([2]), scale=1.0, block_len=none)
    assert out.item() == pytest.approx(5.0) and lse.exp().item() == pytest.approx(4.0)


def test_bits_do_not_depend_on_the_default_dtype() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 8, 4, 16, generator=generator)
    k, v = (torch.randn(6, 4, 2, 16, generator=generator) for _ in range(2))
    table, ctx_len = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([11, 5])
    block = torch.randn(2, 8, 2, 16, generator=generator)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return block_attention(q, k, v, table, ctx_len, block_k=block, block_v=block, block_causal=True)

    want = run()
    torch.set_default_dtype(torch.float64)
    try:
        got = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
