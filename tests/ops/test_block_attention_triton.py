"""The Triton kernels of block attention as a GPU would launch them: tiles, splits, order of programs, bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.block_attention import config
from dmtp_kernels.testing import watch
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.poison import guarded
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.ops.block_attention_oracle import attend, check, oracle, paged
from tests.ops.conftest import INTERPRETED

kernels = pytest.importorskip("dmtp_kernels.ops.block_attention.kernels", reason="triton is not installed")
launch = pytest.importorskip("dmtp_kernels.ops.block_attention.launch", reason="triton is not installed")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with use_backend("triton", "block_attention"), planned_for(132):
        yield


def make(seed: int = 0, **change: Any) -> tuple[Any, dict[str, Any]]:
    shape: dict[str, Any] = {"batch": 2, "slots": 8, "heads": (2, 1), "dim": 16, "pages": 30, "page_size": 64}
    return paged(torch.Generator().manual_seed(seed), **{"dtype": FP32, **shape, **change})


def launches(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, dict[str, watch.Launch]]:
    """What the function returns, and its launches by kernel."""
    seen: dict[str, watch.Launch] = {}

    def note(access: watch.Access) -> None:
        seen[access.launch.kernel] = access.launch

    with watch.watch(note):
        result = function(*inputs, **options)
    return result, seen


def splits(seen: dict[str, watch.Launch]) -> int:
    count: int = seen["block_attention_kernel"].arguments["splits"]
    return count


def same(got: Any, want: Any) -> bool:
    pairs = zip(got, want, strict=True)
    return all(g.contiguous().view(torch.uint8).equal(w.contiguous().view(torch.uint8)) for g, w in pairs)


def of(inputs: Any, block: dict[str, Any], rows: slice | list[int]) -> tuple[Any, dict[str, Any]]:
    """The requests `rows` of a batch."""
    q, k, v, table, ctx_len = inputs
    return (q[rows], k, v, table[rows], ctx_len[rows]), {n: t[rows] for n, t in block.items()}


# one below, on and above a tile (64), a chunk (512), a run of chunks (4,096); and a tail in mid-tile of a later one
EDGES = [0, 1, 63, 64, 65, 511, 512, 513, 576, 1023, 1024, 1025, 1500]


EDGE_MODES: dict[str, dict[str, Any]] = {
    "causal": {"block_causal": True},
    "anchor": {"window": 600},
    "query": {"window": 600, "window_ref": "query"},
    "query_causal": {"window": 513, "window_ref": "query", "block_causal": True},
    "valid_from": {"valid_from": torch.tensor([0, 0, 63, 0, 9, 500, 3, 512, 577, 65, 1024, 600, 1100])},
}


@pytest.mark.parametrize("mode", EDGE_MODES)
@pytest.mark.parametrize("dense_rows", [None, 9])
def test_lengths_around_tiles_and_splits(mode: str, dense_rows: int | None) -> None:
    inputs, block = make(batch=len(EDGES), pages=24, dense_rows=dense_rows, dim=8)
    ctx_len = torch.tensor(EDGES)
    options = EDGE_MODES[mode]
    _, seen = launches(check, *inputs[:4], ctx_len, **block, **options)
    assert splits(seen) > 1


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (10, 2), (6, 1), (7, 1), (8, 1), (12, 1), (24, 1)], ids=str)
@pytest.mark.parametrize("slots", [1, 8, 16])
def test_groups_by_slots(heads: tuple[int, int], slots: int) -> None:
    # 1 to 384 query rows: padded to a tile, one tile, several tiles
    inputs, block = make(heads=heads, slots=slots, dim=4, pages=3, dense_rows=slots)
    check(*inputs[:4], torch.tensor([140, 70]), **block, block_causal=True)


# every dim at a page shorter and a page longer than a tile; a padded dim at every kind of page
LAYOUTS = [
    *((dim, page_size, BF16) for dim in (48, 64, 80, 96, 128, 192, 256) for page_size in (16, 256)),
    *((80, page_size, BF16) for page_size in (1, 3, 48, 64)),
    *((dim, 64, FP32) for dim in (80, 128, 256)),
]


@pytest.mark.parametrize(("dim", "page_size", "dtype"), LAYOUTS, ids=str)
def test_head_dims_and_page_sizes(dim: int, page_size: int, dtype: torch.dtype) -> None:
    pages = -(-150 // page_size)
    inputs, block = make(dim=dim, page_size=page_size, pages=pages, dtype=dtype, dense_rows=8)
    check(*inputs[:4], torch.tensor([140, 66]), **block)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("model", ["mtp", "drafter"])
def test_errors_stay_within_the_budget(dtype: torch.dtype, model: str) -> None:
    heads, dim = ((16, 2), 256) if model == "mtp" else ((32, 4), 128)
    inputs, block = make(batch=1, heads=heads, dim=dim, pages=12, dtype=dtype, dense_rows=8)
    ctx_len, window = torch.tensor([700]), None if model == "mtp" else 512
    # and peaked scores: the weights of some keys are near 1, where a rounded weight shows most
    for scale in (dim**-0.5, 4 * dim**-0.5):
        options: dict[str, Any] = {"window": window, "block_causal": model == "mtp", "scale": scale, **block}
        got = attend(*inputs[:4], ctx_len, **options)
        q, k, v, table = inputs[:4]
        truth, _ = oracle(q, k, v, table, ctx_len, **options)
        assert_within_budget(got.out, truth, eager(q, k, v, table, 700, **options))


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, length: int, *, block_k: torch.Tensor,
    block_v: torch.Tensor, scale: float, window: int | None = None, block_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One request in plain PyTorch at the dtype of q."""
    first = 0 if window is None else max(0, length - window)
    rows = [torch.cat([c[table[0]].flatten(0, 1)[first:length], b[0]]) for c, b in ((k, block_k), (v, block_v))]
    key, value = (r.transpose(0, 1).repeat_interleave(q.shape[2] // r.shape[1], dim=0) for r in rows)  # [Hq, n, D]
    scores = q[0].transpose(0, 1) @ key.transpose(1, 2) * scale
    if block_causal:
        later = torch.ones(q.shape[1], key.shape[1], dtype=torch.bool).triu(length - first + 1)
        scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1)[None]


BIT_MODES: dict[str, dict[str, Any]] = {
    "mtp": {"block_causal": True},
    "drafter": {"window": 1000},
    "query": {"window": 700, "window_ref": "query"},
    "fp8": {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(3.0)},
    "sink": {"sink": torch.arange(2.0), "soft_cap": 3.0},
}


@pytest.mark.parametrize("mode", BIT_MODES)
def test_bits_alone_in_a_batch_and_with_any_table(mode: str) -> None:
    # 32 requests take long chunks, one takes short ones: the sums are the same
    (q, k, v, table, _), block = make(batch=32, dim=16, pages=20, dense_rows=8, dtype=BF16)
    options = BIT_MODES[mode]
    if mode == "fp8":
        k, v = k.nan_to_num().to(torch.float8_e4m3fn), v.nan_to_num().to(torch.float8_e5m2)
    # mostly short, so that the batch takes no time; the longest has a tail in its third short chunk
    ctx_len = torch.full((32,), 3)
    ctx_len[[0, 5, 31]] = torch.tensor([1271, 600, 512])
    with planned_for(40):
        whole, many = launches(attend, q, k, v, table, ctx_len, **block, **options)
    assert splits(many) == 1 and len(many) == 1
    for b in (0, 5, 31):
        inputs, one = of((q, k, v, table, ctx_len), block, slice(b, b + 1))
        alone, seen = launches(attend, *inputs, **one, **options)
        assert splits(seen) > 1
        assert same(alone, (whole.out[b : b + 1], whole.lse[b : b + 1]))
        wide = torch.cat([inputs[3], torch.full((1, 100), -7)], dim=1)
        wider = attend(*inputs[:3], wide, inputs[4], **one, **options)
        assert same(wider, alone)


def test_bits_past_several_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # long chunks of a program each, or their short ones merged by the combine kernel in the same order
    monkeypatch.setattr(config, "_FINE", 128)
    monkeypatch.setattr(config, "_COARSE", 1024)
    inputs, block = make(batch=1, heads=(1, 1), slots=1, dim=4, pages=40, dense_rows=1)
    ctx_len = torch.tensor([40 * 64 - 7])
    few, seen = launches(attend, *inputs[:4], ctx_len, **block)
    assert splits(seen) == 20
    with planned_for(1):
        many, seen = launches(attend, *inputs[:4], ctx_len, **block)
    assert splits(seen) == 3
    assert same(few, many)
    check(*inputs[:4], ctx_len, **block)


@pytest.mark.parametrize("window", [None, 700])
def test_dense_and_cached_blocks_give_the_same_bits(window: int | None) -> None:
    (q, k, v, table, _), _ = make(batch=3, dtype=BF16)
    ctx_len = torch.tensor([1100, 17, 512])
    rows = ctx_len[:, None] + torch.arange(8)
    page, offset = table.gather(1, rows // 64), rows % 64
    cached = attend(q, k, v, table, ctx_len, window=window)
    dense = attend(q, k, v, table, ctx_len, block_k=k[page, offset], block_v=v[page, offset], window=window)
    assert same(cached, dense)


def test_order_of_the_programs_changes_nothing() -> None:
    inputs, block = make(batch=3, dense_rows=8)
    ctx_len, results = torch.tensor([1900, 5, 900]), []
    for seed in range(3):
        with watch.shuffled_programs(seed):
            results.append(attend(*inputs[:4], ctx_len, **block, window=1500))
    assert same(results[1], results[0]) and same(results[2], results[0])


@pytest.mark.parametrize("fill", [NAN, float("inf"), 1e30])
def test_scratch_and_outputs_may_hold_anything(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, block = make(batch=4, dense_rows=8)
    # inert, empty, one chunk, several: none may show what the scratch or the outputs held before
    ctx_len, block_len = torch.tensor([-1, 0, 300, 1500]), torch.tensor([8, 0, 8, 8])
    arguments = {**block, "block_len": block_len, "sink": torch.tensor([0.5, float("-inf")])}
    want = attend(*inputs[:4], ctx_len, **arguments)
    real = launch.workspace

    def filled(key: str, device: torch.device, nbytes: int) -> torch.Tensor:
        scratch = real(key, device, nbytes)
        scratch[: scratch.numel() // 4 * 4].view(FP32).fill_(fill)
        return scratch

    monkeypatch.setattr(launch, "workspace", filled)
    out, lse = torch.full_like(want.out, fill), torch.full_like(want.lse, fill)
    torch.ops.dmtp.block_attention_out(*inputs[:4], ctx_len, **arguments, out=out, lse=lse)
    assert same((out, lse), want)
    assert (out[:2] == 0).all() and (lse[:2] == float("-inf")).all() and torch.isfinite(out).all()


def test_capture_safe_and_allocates_nothing_once_warm() -> None:
    inputs, block = make(batch=4, dense_rows=8)
    ctx_len = torch.tensor([1500, 0, 300, 600])
    out, lse = guarded((4, 8, 2, 16), FP32, row_gap=3), guarded((4, 8, 2), FP32, row_gap=5)
    rest = (None, 900, "query", True, None, None, None, None, None, None)
    for warm in (False, True):
        with capture_safe(allocations=not warm):
            launch.block_attention(*inputs[:4], ctx_len, *block.values(), *rest, out.tensor, lse.tensor)
    out.check()
    lse.check()
    want = attend(*inputs[:4], ctx_len, **block, window=900, window_ref="query", block_causal=True)
    assert same((out.tensor, lse.tensor), want)


def codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("q_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_fp8_code_is_read_exactly(dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    # one key a request, so the output is its row of V: 256 codes over 16 requests of 16 columns
    v = codes(dtype).view(16, 1, 1, 16)
    q, none = torch.zeros(16, 1, 1, 16, dtype=q_dtype), torch.zeros(16, dtype=torch.int64)
    one = torch.tensor(1.0)
    out = attend(
        q, torch.zeros_like(v), v, torch.arange(16)[:, None], none + 1, block_k=q, block_v=q, block_len=none,
        k_scale=one, v_scale=one,
    ).out  # fmt: skip
    want = v.view(torch.uint8).view(dtype).to(FP32).to(q_dtype)
    torch.testing.assert_close(out.view(16, 16), want.view(16, 16), rtol=0, atol=0, equal_nan=True)
    # and as a key: its score is the log of the denominator
    lse = attend(
        torch.full_like(q, 1.0 / 16), v, torch.zeros_like(v), torch.arange(16)[:, None], none + 1, block_k=q,
        block_v=q, block_len=none, k_scale=one, v_scale=one, scale=16.0,
    ).lse  # fmt: skip
    sums = v.to(FP64).sum(dim=3).view(16)
    finite = sums.isfinite()
    torch.testing.assert_close(lse.view(16)[finite].double(), sums[finite], rtol=1e-6, atol=1e-6)
    assert not lse.view(16)[~finite].isfinite().any()


def test_every_operand_may_be_far_apart_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # element offsets beyond 2^31 in each tensor that has requests or pages
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    base = torch.empty(9 * (2**28 + 64), dtype=BF16)

    def far(x: torch.Tensor) -> torch.Tensor:
        return base.as_strided(x.shape, (2**28 + 64, *x.stride()[1:]), 0).copy_(x)

    inputs, block = make(batch=9, slots=2, pages=1, page_size=16, spare=0, dense_rows=2, dtype=BF16)
    ctx_len = torch.arange(9)
    named = dict(zip(("q", "k_cache", "v_cache", "page_table"), inputs[:4], strict=True)) | block
    want = attend(**named, ctx_len=ctx_len)
    for name in ("q", "k_cache", "v_cache", "block_k", "block_v"):
        got = attend(**named | {name: far(named[name])}, ctx_len=ctx_len)
        assert same(got, want), name
    out, lse = far(torch.zeros_like(want.out)), want.lse.clone()
    torch.ops.dmtp.block_attention_out(*inputs[:4], ctx_len, **block, out=out, lse=lse)
    assert same((out, lse), want)


def test_long_heads_and_tables_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    for dim, columns in ((257, 2), (16, 2**26 + 1)):
        (q, k, v, _, _), block = make(dim=dim, pages=2, page_size=16, dense_rows=8, spare=0)
        table = torch.empty(2, columns, dtype=torch.int32)
        table[:, :2] = 1
        ctx_len = torch.tensor([5, 3])
        got, seen = launches(attend, q, k, v, table, ctx_len, **block, window=5)
        assert seen == {} and torch.isfinite(got.out).all()


@pytest.mark.parametrize("variant", config.variants(), ids=lambda v: v.name)
def test_variants_name_every_argument(variant: Any) -> None:
    kernel = getattr(kernels, variant.kernel.partition(":")[2])
    assert sorted([*variant.signature, *variant.constants]) == sorted(kernel.arg_names)
    assert set(variant.aligned) <= set(variant.signature) and set(variant.streams) <= set(variant.signature)
