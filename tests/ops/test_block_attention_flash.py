"""FlashAttention as a backend: which cases its masks express, what it refuses, and how its calls are merged.

FlashAttention itself runs in tests/gpu alone; here its documented masks are boolean matrices.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dmtp_kernels
from dmtp_kernels import backends, doctor
from dmtp_kernels.ops.block_attention import flash
from dmtp_kernels.ops.block_attention.flash_masks import Case, Library, Part, plan, refusal
from tests.ops.block_attention_oracle import attend, oracle, paged, visible
from tests.ops.conftest import INTERPRETED
from tests.ops.flash_documented import DOCUMENTED, MODULES, window_mask

pytestmark = pytest.mark.skipif(INTERPRETED, reason="has no Triton kernel")
truth: Any = oracle
run_parts: Any = flash.run_parts
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = Case(torch.bfloat16, torch.bfloat16, 128, 256, 8, None, None, "anchor", True, 0.1)
TWO, THREE, FOUR = (Library(n, v, (9, 0)) for n, v in ((2, "2.8.3"), (3, "3.0.0"), (4, "4.0.0")))

WINDOWS = (None, 0, 1, 2, 3, 8, 9, 10, 12, 13, 20, 60)
HISTORIES = (0, 1, 2, 7, 11, 12, 13, 40)
MASKS = [
    dataclasses.replace(CASE, slots=slots, block_rows=rows, window=window, window_ref=ref, block_causal=causal)
    for slots in (1, 2, 8)
    for rows in (None, slots, slots + 1, slots + 4)
    for window, ref, causal in itertools.product(WINDOWS, ("anchor", "query"), (True, False))
]


def wanted(case: Case, history: int, block_len: int | None = None, valid_from: int = 0) -> torch.Tensor:
    return torch.from_numpy(
        visible(
            history, case.slots, case.block_rows or case.slots, window=case.window, window_ref=case.window_ref,
            block_causal=case.block_causal, block_len=block_len, valid_from=valid_from,
        )
    )  # fmt: skip


def counted(
    parts: tuple[Part, ...], case: Case, history: int, block_len: int | None = None, valid_from: int = 0
) -> torch.Tensor:
    """How often each query sees each key `[S, history + rows]` in the documented masks of all calls."""
    rows = case.block_rows or case.slots
    length = rows if block_len is None else block_len
    seen = torch.zeros(case.slots, history + rows, dtype=torch.int64)
    for part in parts:
        first, last = {
            "cache": (min(valid_from, history), history + length),
            "context": (min(valid_from, history), history),
            "block": (history, history + length),
        }[part.keys]
        queries = 1 if part.folded else case.slots
        seen[:, first:last] += window_mask(queries, last - first, False, part.left, part.right)
    return seen


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_accepted_masks_are_the_ops(slots: int) -> None:
    accepted = 0
    for case in (c for c in MASKS if c.slots == slots):
        parts = plan(case)
        if isinstance(parts, str):
            continue
        accepted += 1
        for history, valid_from in itertools.product(HISTORIES, (0, 1, 11, 50)):
            got = counted(parts, case, history, valid_from=valid_from)
            assert torch.equal(got, wanted(case, history, valid_from=valid_from).long()), (case, history)
    assert accepted > 100


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_accepted_partly_valid_blocks(slots: int) -> None:
    accepted = 0
    for case in (dataclasses.replace(c, block_len=True) for c in MASKS if c.slots == slots):
        parts = plan(case)
        if isinstance(parts, str):
            continue
        accepted += 1
        for history, block_len in itertools.product(HISTORIES, range((case.block_rows or slots) + 1)):
            got = counted(parts, case, history, block_len)
            assert torch.equal(got, wanted(case, history, block_len).long()), (case, history, block_len)
    assert accepted > 20


def test_what_is_refused_has_no_window_of_flash_attention() -> None:
    # every pair of bounds is tried on every case with the block in the cache that is refused for its mask
    refused = [c for c in MASKS if c.block_rows is None and isinstance(plan(c), str)]
    assert {(c.window_ref, c.slots > 1) for c in refused} == {("anchor", True)}
    for case in refused:
        if case.window is not None and case.window < max(HISTORIES):
            masks = {h: wanted(case, h).long() for h in HISTORIES}
            for left, right in itertools.product(range(-1, 70), range(-1, 12)):
                parts = (Part("cache", left, right),)
                assert any(not torch.equal(counted(parts, case, h), m) for h, m in masks.items()), (case, left, right)


def test_a_window_that_ends_in_a_dense_block_is_refused_where_some_query_sees_context() -> None:
    for case in (c for c in MASKS if c.block_rows is not None and isinstance(plan(c), str)):
        assert case.block_rows is not None and case.window_ref == "query"
        seen = wanted(case, 40)[:, :40]
        assert seen[0].any() and not seen[-1].any()


REFUSALS: dict[str, tuple[Library, dict[str, Any], str]] = {
    "float32": (TWO, {"dtype": torch.float32}, "q: dtype is torch.float32"),
    "fp8": (THREE, {"cache_dtype": torch.float8_e4m3fn}, "k_cache: dtype is torch.float8_e4m3fn"),
    "scales": (THREE, {"scales": True}, "k_scale, v_scale: "),
    "scale": (TWO, {"scale": 0.0}, "scale: is 0.0"),
    "head_dim": (TWO, {"head_dim": 100}, "q: head dimension is 100"),
    "wide_head": (THREE, {"head_dim": 264}, "q: head dimension is 264"),
    "unaligned": (THREE, {"aligned": False}, "k_cache, v_cache: "),
    "pages_2": (TWO, {"page_size": 16}, "k_cache: pages have 16 rows, FlashAttention 2 (2.8.3) takes multiples of 256"),
    "skip_2": (TWO, {"valid_from": True}, "valid_from: FlashAttention 2 (2.8.3) has no left bound"),
    "skip_4": (FOUR, {"valid_from": True}, "valid_from: FlashAttention 4 (4.0.0) has no left bound"),
    "old_gpu_2": (Library(2, "2.8.3", (7, 5)), {}, "FlashAttention 2 (2.8.3) needs compute capability 8.0"),
    "ampere_3": (Library(3, "3.0.0", (8, 0)), {}, "FlashAttention 3 (3.0.0) is for compute capability 9.0"),
    "blackwell_3": (Library(3, "3.0.0", (10, 0)), {}, "FlashAttention 3 (3.0.0) is for compute capability 9.0"),
    "ampere_4": (Library(4, "4.0.0", (8, 0)), {}, "FlashAttention 4 (4.0.0) has no paged kernel"),
    "wide_4": (Library(4, "4.0.0", (10, 0)), {"head_dim": 256}, "q: head dimension is 256, FlashAttention 4 (4.0.0)"),
    "anchor": (THREE, {"window": 4096}, "window: the anchor rule"),
    "inside": (THREE, {"window": 8, "window_ref": "query", "block_rows": 8}, "window: 8 ends inside a dense block"),
    "block_len": (THREE, {"block_len": True}, "block_len: with block_causal"),
    "block_len_1": (THREE, {"block_len": True, "window": 4, "slots": 1}, "block_len: with a window"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument(name: str) -> None:
    library, change, reason = REFUSALS[name]
    case = dataclasses.replace(CASE, page_size=16 if library.generation != 2 else 256)
    capability = 9 if library.generation == 3 or name == "old_gpu_2" else library.capability[0]
    accepted = dataclasses.replace(library, capability=(max(capability, 9), 0))
    assert refusal(case, accepted) is None
    got = refusal(dataclasses.replace(case, **change), library)
    assert got is not None and got.startswith(reason)


def test_the_rounds_own_calls() -> None:
    # target and MTP: dense causal blocks; drafter: a draft table with its skip, or the anchor window itself
    causal = dataclasses.replace(CASE, block_rows=9, page_size=16)
    drafter = dataclasses.replace(causal, block_rows=8, block_causal=False)
    assert refusal(causal, THREE) is None and refusal(causal, FOUR) is None
    assert refusal(dataclasses.replace(drafter, valid_from=True), THREE) is None
    assert refusal(dataclasses.replace(drafter, window=4096), FOUR) is None


# the calls, with the documentation standing in for the libraries


@pytest.fixture(params=[2, 3, 4])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    generation: int = request.param
    for name in ("flash_attn", MODULES[generation]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, function in vars(DOCUMENTED[generation]).items():
        if name.startswith("flash_"):
            monkeypatch.setattr(sys.modules[MODULES[generation]], name, function, raising=False)
    return generation


@pytest.fixture
def run(library: int) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, table: Any, ctx_len: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        names = ("block_k", "block_v", "block_len", "window", "window_ref", "block_causal", "valid_from", "scale")
        defaults = {"window_ref": "anchor", "block_causal": False}
        inputs = [q, k, v, table, ctx_len, *(options.get(n, defaults.get(n)) for n in names), None, None]
        inputs += [options.get("soft_cap"), options.get("sink")]
        case = flash._case(*inputs)
        reason = refusal(case, Library(library, "9.9.9", (9, 0)))
        if reason is not None:
            pytest.skip(reason)
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
        run_parts(case, flash._runs()[library], *inputs, out, lse)
        return out, lse

    return call


CALLS: dict[str, dict[str, Any]] = {
    "causal_in_cache": {"block_causal": True},
    "causal_dense": {"dense_rows": 8, "block_causal": True},
    "pending_row": {"dense_rows": 9, "block_causal": True},
    "drafter_window": {"dense_rows": 8, "window": 21},
    "drafter_skip": {"dense_rows": 8, "valid_from": torch.tensor([0, 0, 3, 200, 17])},
    "skip_in_cache": {"block_causal": True, "valid_from": torch.tensor([-1, 0, 3, 200, 17])},
    "query_window": {"dense_rows": 8, "window": 21, "window_ref": "query", "block_causal": True},
    "query_in_cache": {"window": 21, "window_ref": "query"},
    "query_block_alone": {"dense_rows": 8, "window": 1, "window_ref": "query"},
    "no_context": {"dense_rows": 8, "window": 0},
    "nothing": {"window": 0, "window_ref": "query"},
    "capped": {"dense_rows": 8, "block_causal": True, "soft_cap": 1.5, "scale": 0.4},
    "endless_window": {"window": 2**40, "block_causal": True},
    "sink": {"dense_rows": 8, "sink": torch.tensor([0.5, -torch.inf, 3.0, -2.0])},
    "part_of_a_block": {"dense_rows": 8, "block_len": torch.tensor([0, 8, 3, 8, 1])},
    "part_in_cache": {"block_len": torch.tensor([0, 8, 3, 8, 1]), "sink": torch.zeros(4)},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_merged_to_the_ops_result(name: str, library: int, run: Callable[..., Any]) -> None:
    options = dict(CALLS[name])
    size = 256 if library == 2 else 16
    inputs, block = paged(
        torch.Generator().manual_seed(2), batch=5, slots=8, heads=(4, 2), dim=16, pages=-(-160 // size), page_size=size,
        dense_rows=options.pop("dense_rows", None), dtype=torch.bfloat16,
    )  # fmt: skip
    ctx_len = torch.tensor([0, 1, 21, 100, 152])
    out, lse = run(*inputs[:4], ctx_len, **block, **options)
    want_out, want_lse = truth(*inputs[:4], ctx_len, **block, **options)
    torch.testing.assert_close(out.double(), want_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_dead_rows_and_table_entries(dense: bool, library: int, run: Callable[..., Any]) -> None:
    # negative and too long lengths are inert; entries that nobody sees may hold anything; a visible unmapped page is
    # NaN
    size = 256 if library == 2 else 16
    (q, k, v, table, _), block = paged(
        torch.Generator().manual_seed(2), batch=6, slots=4, heads=(2, 1), dim=8, pages=3, page_size=size,
        dense_rows=4 if dense else None, dtype=torch.float16,
    )  # fmt: skip
    ctx_len = torch.tensor([-1, 3 * size - 3 + 4 * dense, 0, size, size + 5, 5], dtype=torch.int32)
    options: dict[str, Any] = {"block_causal": True}
    if not dense:
        options.update(window=size - 4, window_ref="query")
    with dmtp_kernels.use_backend("reference"):
        want = attend(q, k, v, table, ctx_len, **block, **options)
    table[:2], table[2, 1:], table[3, 2:], table[5, 0] = -7, 2**40, -1, -1
    out, lse = run(q, k, v, table, ctx_len, **block, **options)
    torch.testing.assert_close(out[:5], want.out[:5], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[:5], want.lse[:5])
    assert (lse[:2] == -torch.inf).all() and torch.isfinite(lse[2:5]).all()
    assert out[5].isnan().all() and lse[5].isnan().all()


def test_pages_before_a_window_may_be_unmapped(library: int, run: Callable[..., Any]) -> None:
    size = 256 if library == 2 else 16
    (q, k, v, table, _), block = paged(
        torch.Generator().manual_seed(2), batch=2, slots=4, heads=(2, 1), dim=8, pages=4, page_size=size, dense_rows=4,
        dtype=torch.float16, spare=0,
    )  # fmt: skip
    ctx_len = torch.tensor([3 * size, 3 * size - 1])
    want = oracle(q, k, v, table, ctx_len, **block, window=size)
    table[:, 0], table[0, 1] = -1, -1
    _, lse = run(q, k, v, table, ctx_len, **block, window=size)
    torch.testing.assert_close(lse[0].double(), want[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[1].double(), want[1][1], rtol=1e-5, atol=1e-5)
    table[1, 1] = -1  # row 2 * size - 1 is in the second request's window
    assert run(q, k, v, table, ctx_len, **block, window=size)[1][1].isnan().all()


def test_an_unmapped_page_without_a_visible_row_is_harmless(library: int, run: Callable[..., Any]) -> None:
    # valid_from at the anchor leaves the dense block alone; a page with rows of the context is there all the same
    inputs, block = paged(
        torch.Generator().manual_seed(2), batch=2, slots=4, heads=(2, 1), dim=8, pages=2, page_size=16, dense_rows=4,
        dtype=torch.float16,
    )  # fmt: skip
    ctx_len, skip = torch.tensor([5, 21]), torch.tensor([5, 99])
    inputs[3][:] = -1
    out, lse = run(*inputs[:4], ctx_len, **block, valid_from=skip)
    want = truth(*inputs[:4], ctx_len, **block, valid_from=skip)
    torch.testing.assert_close(out.double(), want[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=1e-5)


def test_block_lengths_are_clamped(library: int, run: Callable[..., Any]) -> None:
    size = 256 if library == 2 else 16
    inputs, block = paged(
        torch.Generator().manual_seed(2), batch=3, slots=4, heads=(2, 1), dim=8, pages=2, page_size=size, dense_rows=4,
        dtype=torch.float16,
    )  # fmt: skip
    ctx_len = torch.tensor([5, 0, 9])
    got = run(*inputs[:4], ctx_len, **block, block_len=torch.tensor([9, -3, 2]))
    want = run(*inputs[:4], ctx_len, **block, block_len=torch.tensor([4, 0, 2]))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# finding it, and saying so


def install(folder: Path, *packages: tuple[str, str]) -> None:
    for name, version in packages:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    flash.installed.cache_clear()
    backends._chosen.clear()
    yield tmp_path
    flash.installed.cache_clear()
    backends._chosen.clear()


def test_installed_versions_are_found_without_importing_them(site: Path) -> None:
    install(site, ("flash-attn", "2.7.4.post1"), ("flash_attn_3", "3.0.0b1"), ("flash-attn-4", "4.0.0b5"))
    assert flash.installed() == ((3, "3.0.0b1"), (4, "4.0.0b5"), (2, "2.7.4.post1"))
    assert "flash_attn" not in sys.modules
    assert flash.missing(CUDA) is None
    assert flash.missing(CPU) == "FlashAttention needs CUDA tensors, got cpu"


def test_too_old_or_none(site: Path) -> None:
    install(site, ("flash-attn", "2.5.9"))
    assert flash.installed() == ()
    reason = flash.missing(CUDA)
    assert reason == "no FlashAttention is installed (flash-attn from 2.6 on, flash-attn-3 or flash-attn-4)"


def test_a_bare_module_of_three_counts(site: Path) -> None:
    (site / "flash_attn_interface.py").write_text("raise ImportError('must not be imported')\n")
    assert flash.installed() == ((3, "unknown version"),)


def test_it_is_never_chosen_by_itself(site: Path) -> None:
    install(site, ("flash-attn", "2.8.3"))
    assert backends.unavailable("block_attention", "flash", CUDA) is None
    assert backends.choose("block_attention", CUDA) != "flash"
    with dmtp_kernels.use_backend("flash", "block_attention"):
        assert backends.choose("block_attention", CUDA) == "flash"
        assert backends.choose("lm_head_select", CPU) != "flash"


def test_a_forced_one_that_cannot_run_says_why(site: Path) -> None:
    inputs, _ = paged(torch.Generator(), batch=1, slots=2, heads=(2, 1), dim=8, pages=2, page_size=16)
    with dmtp_kernels.use_backend("flash", "block_attention"):
        reason = dmtp_kernels.supports("block_attention", *inputs)
        assert reason is not None and "'flash' was forced, but no FlashAttention is installed" in reason
        with pytest.raises(backends.BackendUnavailable, match="no FlashAttention is installed"):
            attend(*inputs)


def test_supports_gives_the_reason_of_each_library(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, ("flash-attn", "2.8.3"), ("flash-attn-4", "4.0.0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (q, k, v, table, _), _ = paged(
        torch.Generator(), batch=1, slots=2, heads=(2, 1), dim=8, pages=2, page_size=16, dtype=torch.float16
    )
    inputs = [q, k, v, table, torch.tensor([3]), None, None, None, None, "anchor", True, None, None, None, None]
    assert flash.refuses(*inputs, None, None) is None
    inputs[11] = torch.tensor([1])
    reason = flash.refuses(*inputs, None, None)
    assert reason is not None and all(
        name in reason for name in ("FlashAttention 2 (2.8.3)", "FlashAttention 4 (4.0.0)")
    )


def test_doctor_reports_version_or_reason(site: Path) -> None:
    found = doctor.report()
    assert found["versions"]["flash-attn"] is None
    assert found["backends"]["flash"]["cpu"]["why_not"].startswith("no FlashAttention is installed")
    assert "no FlashAttention is installed" in doctor.render(found)
    install(site, ("flash-attn", "2.8.3"))
    flash.installed.cache_clear()
    found = doctor.report()
    assert found["versions"]["flash-attn"] == "2.8.3"
    assert found["backends"]["flash"]["cpu"]["why_not"] == "FlashAttention needs CUDA tensors, got cpu"
    assert doctor._backend("flash", "cuda") == {"ops": 1, "why_not": None}
