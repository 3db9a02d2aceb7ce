"""Inputs and traffic of the commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic
from dmtp_kernels.ops.commit_kv import spec_round
from dmtp_kernels.ops.commit_kv.spec_cache import cache_case, floor_bytes, full_case

COMMIT = Spec(
    op="commit_kv",
    cases=(
        Case("round", "the DMTP round: eight rows, one MTP layer, pending and scratch", cache_case(4)),
        Case(
            "layers",
            "several layers, K wider than V, bf16, int32",
            cache_case(3, layers=3, dims=(24, 16), dtype=torch.bfloat16, index=torch.int32),
        ),
        Case("shifted", "engines that shift MTP by one: no pending slot, no scratch", cache_case(5, pending=False)),
        Case(
            "paged",
            "paged K and V packed in one allocation, heads outside tokens",
            cache_case(3, page_size=4, packed=True),
        ),
        Case("strided", "K and V halves of one row", cache_case(3, rows=5, heads=3, dims=(10, 10), packed=True)),
        Case(
            "scaled",
            "scales of a head and of a layer",
            cache_case(3, layers=2, page_size=4, dtype=torch.bfloat16, scaled=True),
        ),
        Case(
            "rotated",
            "half of each K row is rotated, positions leave the table",
            cache_case(3, dims=(16, 8), turns=True),
        ),
        Case("autoregressive", "one row per request", cache_case(7, rows=1)),
        Case("empty", "no request", cache_case(0)),
    ),
    floor_bytes=floor_bytes,
    flops=lambda *_: 0,
    exact=True,
)

SPECS = (COMMIT, spec_round.ROUND)

_KERNEL = "commit_kv_kernel"


def _traffic(name: str, why: str, make: Callable[[torch.Generator], tuple[Any, ...]]) -> Traffic:
    return Traffic("commit_kv", Case(name, why, make), {_KERNEL: floor_bytes})


TRAFFIC = (
    _traffic("mtp", "one MTP layer of 2 heads of 256, 32 requests", full_case(32, 2, 256, 1)),
    _traffic("mtp_fp8", "its cache in e4m3fn", full_case(32, 2, 256, 1, fp8=torch.float8_e4m3fn)),
    _traffic("layers", "8 layers of 8 heads of 128, rows alone", full_case(8, 8, 128, 8, rounds=False)),
    _traffic("alone", "one request of 8 layers of 4 heads of 128", full_case(1, 4, 128, 8, rounds=False)),
    *spec_round.TRAFFIC,
)
