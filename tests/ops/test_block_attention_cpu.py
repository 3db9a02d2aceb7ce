"""Block attention's compiled kernels at every instruction set: dtypes, threads, memory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dmtp_kernels import backends
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.ops.block_attention_oracle import attend, check, oracle, paged

KERNEL_OPS = ("block_attention",)
EVERY_CAPABILITY = True
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES: dict[str, dict[str, Any]] = {
    "mtp": {"block_causal": True},
    "drafter": {"window": 300},
    "query": {"window": 300, "window_ref": "query"},
    "capped": {"soft_cap": 2.0, "sink": torch.tensor([0.5, -1.0, 2.0, float("-inf")])},
}


@pytest.fixture(autouse=True)
def _cpu_only(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("of the compiled kernels")


@functools.cache
def make(dtype: torch.dtype, dim: int, cache: torch.dtype | None = None, slots: int = 8) -> tuple[Any, Any, Any]:
    """Four requests, of which one is longer than a chunk of 1,024 rows; pages of 16."""
    (q, k, v, table, _), block = paged(
        torch.Generator().manual_seed(dim), batch=4, slots=slots, heads=(4, 2), dim=dim, pages=84, page_size=16,
        dense_rows=slots, dtype=dtype,
    )  # fmt: skip
    if cache is not None:
        k, v = k.to(cache), v.to(cache)
        block["k_scale"], block["v_scale"] = torch.tensor([0.5, 1.5]), torch.rand(4, 2) + 0.5
    return (q, k, v, table), torch.tensor([1300, 0, 130, 1025]), block


@functools.cache
def truth(mode: str, dtype: torch.dtype, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One for all instruction sets: most of the time goes into it."""
    (q, k, v, table), ctx_len, block = make(dtype, dim)
    return oracle(q, k, v, table, ctx_len, **block, **MODES[mode])


@pytest.mark.parametrize("dim", [48, 64, 80, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_and_mask(mode: str, dtype: torch.dtype, dim: int) -> None:
    inputs, ctx_len, block = make(dtype, dim)
    check(*inputs, ctx_len, **block, **MODES[mode], truth=truth(mode, dtype, dim))


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_fp8_caches(dtype: torch.dtype, cache: torch.dtype) -> None:
    for dim in (64, 80):
        inputs, ctx_len, block = make(dtype, dim, cache)
        check(*inputs, ctx_len, **block, window=700)


def test_every_fp8_number() -> None:
    # one key: the output is its value, NaN where the code is
    for cache in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(cache)
        values = codes.view(1, 1, 1, 256)
        keys = torch.zeros(256).to(cache).view(1, 1, 1, 256)
        one = torch.ones(())
        for dtype in (BF16, FP32):
            got = attend(
                torch.zeros(1, 1, 1, 256, dtype=dtype), keys, values, torch.zeros(1, 1, dtype=torch.int32),
                torch.tensor([1]), block_len=torch.tensor([0]), k_scale=one, v_scale=one,
            )  # fmt: skip
            assert torch.equal(got.out.view(-1).nan_to_num(7e4), codes.to(dtype).nan_to_num(7e4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype, mode: str) -> None:
    inputs, ctx_len, block = make(dtype, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5, 16):  # few requests a thread: chunks of one request run side by side
            torch.set_num_threads(count)
            results.append(attend(*inputs, ctx_len, **block, **MODES[mode]))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        assert torch.equal(got.out, results[0].out) and torch.equal(got.lse, results[0].lse)


def test_a_long_block_is_cut_into_rows() -> None:
    # 70 slots times a group of two: more rows than a unit holds
    for dtype in (BF16, FP32):
        inputs, ctx_len, block = make(dtype, 64, slots=70)
        check(*inputs, ctx_len.clamp(max=1200), **block, block_causal=True)


_PEAK = """
import resource, torch, dmtp_kernels
from dmtp_kernels.ops.block_attention import block_attention
torch.set_num_threads(2)
pages = {pages}
q = torch.zeros(2, 8, 8, 128, dtype=torch.bfloat16)
k = torch.zeros(64, 16, 2, 128, dtype=torch.bfloat16)
table = (torch.arange(2 * pages, dtype=torch.int32) % 64).view(2, pages)
ctx = torch.full((2,), pages * 16 - 8)
block_attention(q, k, k, table[:, :64], ctx.clamp(max=1000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = block_attention(q, k, k, table, ctx).out
assert out.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_extra_memory_does_not_grow_with_the_history(backend: str, request: pytest.FixtureRequest) -> None:
    # 64 Ki rows a head gathered would be 67 MB
    environment = {**os.environ, "DMTP_CPU_CAPABILITY": backends.compiled().capability()}
    found = subprocess.run(
        [sys.executable, "-c", _PEAK.format(pages=4096)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 4096, "KiB"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_errs_at_most_twice_as_much_as_torch(dtype: torch.dtype) -> None:
    (q, k, v, table), ctx_len, block = make(dtype, 64)
    got = attend(q, k, v, table, ctx_len, **block).out
    truth, _ = oracle(q, k, v, table, ctx_len, **block)
    eager = torch.empty_like(got)
    for b, length in enumerate(ctx_len.tolist()):
        keys, values = (
            torch.cat((c[table[b]].flatten(0, 1)[:length], rows[b])).transpose(0, 1)
            for c, rows in ((k, block["block_k"]), (v, block["block_v"]))
        )
        eager[b] = F.scaled_dot_product_attention(q[b].transpose(0, 1), keys, values, enable_gqa=True).transpose(0, 1)
    assert_within_budget(got, truth, eager, name="out")
