"""Block attention at the shapes of an MTP layer and of a drafter, against torch's attention over gathered pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels import backends
from dmtp_kernels.bench.attention import BASELINES, OP, Problem, Shape, runs
from tests.bench.test_t1 import DEVICE, _no_poison, device_clock, replayed

__all__ = ["_no_poison"]  # the fixture of the other file holds here too

SHAPES = {
    "mtp": Shape(B=8, history=8192),
    "drafter": Shape(B=8, history=8192, Hq=32, Hkv=8, D=128, window=4096),
    "drafter_4_kv": Shape(B=8, history=8192, Hq=32, Hkv=4, D=128, window=4096),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entry", [backends.choose(OP, DEVICE), *BASELINES])
@pytest.mark.benchmark(timer=device_clock, min_rounds=7, warmup=False)
def test_block_attention(benchmark: Any, entry: str, shape: str) -> None:
    problem = Problem(SHAPES[shape], DEVICE)
    skipped: dict[str, str] = {}
    found = runs(problem, [entry], skipped)
    if not found:
        pytest.skip(skipped[entry])
    benchmark.group = f"{OP} {shape}"
    benchmark.extra_info["device"] = str(DEVICE)
    benchmark.extra_info["backend"] = "torch" if entry in BASELINES else entry
    benchmark.extra_info["floor_mb"] = problem.bytes() / 1e6
    (run,) = found.values()
    benchmark(replayed(run))
    assert torch.isfinite(problem.op()).all()
