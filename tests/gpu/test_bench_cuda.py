"""The benchmark's cases on a CUDA device: right there too, and timed as replayed graphs."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.bench.agree import disagreement
from dmtp_kernels.bench.cases import BenchCase, Suite
from dmtp_kernels.bench.ops import bench_ops

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SUITE = Suite(CUDA, scale=64)


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c.op}-{c.name}") for c in SUITE.cases()])
def test_what_is_timed_is_right(case: BenchCase) -> None:
    assert disagreement(case.load()) is None


def test_events_time_replays_of_every_entry() -> None:
    report = bench_ops(["accept_prefix", "sample_rows"], rounds=2, scale=64, device=CUDA)
    assert report["environment"]["clock"] == "events" and report["bandwidth_gb_s"] > 0
    for case in report["cases"]:
        assert case["agrees"] and case["speedup"]["eager"]["median"] > 0
        assert all(0 < ms < 100 for turn in case["entries"]["op"]["samples"] for ms in turn)
