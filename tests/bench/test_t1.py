"""T1 preparation by head format, against the eager chain and its compiled form, one group per shape.

On a machine with CUDA the same entries run there, as replayed graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from dmtp_kernels import backends
from dmtp_kernels.bench.t1 import ENTRIES, FORMATS, Stage, runs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# a quarter of a 248,320-row vocabulary (TP4): what one rank holds, and 254 MB of bf16 rows
VOCAB, HIDDEN, RANK = 62_080, 2048, 256


def device_clock() -> float:
    """Seconds, once all work on the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def stage() -> Stage:
    return Stage(VOCAB, HIDDEN, RANK, DEVICE, list(FORMATS))


@pytest.fixture(autouse=True)
def _no_poison() -> Iterator[None]:
    # poisoning every allocation would be timed too
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    run()
    if DEVICE.type != "cuda":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.benchmark(timer=device_clock, min_rounds=7, warmup=False)
def test_t1(benchmark: Any, entry: str, batch: int) -> None:
    skipped: dict[str, str] = {}
    run = runs(stage(), batch, [entry], skipped).get(entry)
    if run is None:
        pytest.skip(skipped[entry])
    benchmark.group = f"t1 B={batch} V={VOCAB} H={HIDDEN}"
    benchmark.extra_info["device"] = str(DEVICE)
    benchmark.extra_info["backend"] = backends.choose("fused_t1_prep", DEVICE) if entry in FORMATS else "torch"
    benchmark.extra_info["floor_mb"] = stage().bytes_of(entry, batch) / 1e6
    benchmark(replayed(run))
