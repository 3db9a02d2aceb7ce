"""What the cases of the commit's spec leave out: conversions, norms, and rows that lie where others go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops.commit_kv.spec_cache import cache_case
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.cuda_host import host
from tests.cuda_host.cases import CPU, Compared, outputs_of

SEEDS = range(8)
HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EDGES = torch.tensor([0.0, -0.0, 448.0, 464.0, -1e9, 1e-9, 57344.0, 61440.0, 2**-9, 2**-10, 3 * 2**-11, 2**-16, 2**-24])


@pytest.fixture(autouse=True)
def on_fibers() -> Iterator[None]:
    with host.emulated("commit_kv"):
        yield


def equal(inputs: tuple[Any, ...]) -> None:
    compared = Compared("commit_kv", inputs)
    for seed in SEEDS:
        assert compared.differs(seed) is None, seed


@pytest.mark.parametrize(
    ("rows", "cache", "scaled"),
    [
        *((BF16, E4M3, True), (FP32, E5M2, True), (HALF, E4M3, True), (FP64, E5M2, True), (FP32, FP64, True)),
        *((FP32, HALF, False), (HALF, BF16, False), (FP64, HALF, False), (FP32, FP64, False), (HALF, HALF, True)),
    ],
    ids=str,
)
def test_conversions(rows: torch.dtype, cache: torch.dtype, scaled: bool) -> None:
    made = list(cache_case(3, layers=2, page_size=4, dtype=rows, scaled=scaled)(torch.Generator().manual_seed(1)))
    for kind in (0, 1):
        for tensor in made[kind]:
            tensor[0, :, 0, : len(EDGES)] = EDGES.to(rows)
            if cache in (E4M3, E5M2):
                tensor[1, :, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(rows)
    made[2:4] = [[tensor.to(cache) for tensor in kind] for kind in made[2:4]]
    equal(tuple(made))


@pytest.mark.parametrize("turns", [False, True])
def test_rows_may_lie_in_the_scratch_they_leave(turns: bool) -> None:
    # row j goes where row 7 - j lies
    batch, rows, heads, dim = 3, 8, 2, 16
    made = list(cache_case(batch, turns=turns)(torch.Generator().manual_seed(2)))
    slots = torch.arange(batch * rows).view(batch, rows)
    pending = batch * rows + torch.arange(batch)
    for kind in (0, 1):
        made[kind] = [cache[: batch * rows].view(batch, rows, heads, dim) for cache in made[2 + kind]]
    made[5:9] = slots.flip(1), pending, pending + batch, slots
    made[4], made[12], made[13] = torch.tensor([8, 3, 5]), None, 0
    equal(tuple(made))


@pytest.mark.parametrize("dim", [16, 40])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_norms_err_no_more_than_eager(dtype: torch.dtype, dim: int) -> None:
    def call(wanted: torch.dtype, backend: str, seed: int = 0) -> list[torch.Tensor]:
        made = list(cache_case(3, dims=(dim, dim), dtype=dtype)(torch.Generator().manual_seed(3)))
        for i in range(4):
            made[i] = [tensor.to(wanted) for tensor in made[i]]
        made[9], made[10] = None, None
        made[16:19] = [torch.linspace(0.5, 2, dim).to(dtype).to(wanted)], 1e-6, 1.0
        outputs = outputs_of("commit_kv", tuple(made))
        host.seed(seed)
        with use_backend(backend, "commit_kv"):
            backends.implementation("commit_kv", CPU)(*made, *outputs)
        return [*made[2], *made[3]]

    truth, eager = call(FP64, "reference"), call(dtype, "reference")
    for seed in SEEDS:
        for got, exact, usual in zip(call(dtype, "cuda", seed), truth, eager, strict=True):
            assert_within_budget(got, exact, usual)
