"""Every op at the sizes of a 35B model over four ranks, by what runs it here, and the eager chain it replaces.

A number here compares two commits on one machine, roughly; `python -m profiling.pair` compares them well. `floor_mb` is
what a perfect kernel moves.
"""

from __future__ import annotations

from typing import Any

import pytest

from dmtp_kernels.bench.cases import BenchCase, Suite
from tests.bench.test_t1 import DEVICE, _no_poison, device_clock, replayed

__all__ = ["_no_poison"]  # the fixture of the other file holds here too

SUITE = Suite(DEVICE, scale=4)
CASES = [pytest.param(c, id=f"{c.op}-{c.name}") for c in SUITE.cases()]


@pytest.mark.parametrize("entry", ["op", "eager"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.benchmark(timer=device_clock)
def test_op(benchmark: Any, case: BenchCase, entry: str) -> None:
    problem = case.load()
    run = replayed(problem.fused() if entry == "op" else problem.eager())
    benchmark.group = f"{case.op} {case.name}"
    benchmark.extra_info["device"] = str(DEVICE)
    benchmark.extra_info["backend"] = problem.backend if entry == "op" else f"torch ({problem.eager_is})"
    benchmark.extra_info["floor_mb"] = problem.floor_bytes / 1e6
    # an op that advances its own state must start every round from the same one
    benchmark.pedantic(run, setup=problem.reset, rounds=15, warmup_rounds=2)
