"""Timing entries against each other in one run, and the bandwidth that bounds them."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels import backends
from dmtp_kernels.bench.progress import Report, silent
from dmtp_kernels.ops._pages import zeros

READ_BYTES = 1 << 29
"""Read by the bandwidth probe: more than the caches hold."""
_FLUSH_BYTES = 1 << 28
_WARMUPS = 3


def medians(
    entries: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, say: Report = silent
) -> dict[str, float]:
    """Median milliseconds of each entry over `rounds` rounds; a round runs every entry once, in turn.

    Turns spread a machine's other load over all entries alike and leave each one's data cold in the caches. On a CUDA
    device an entry is captured once and its replays are timed with events, after the L2 cache is overwritten.

    Raises:
        ValueError: no round.
    """
    if rounds < 1:
        raise ValueError(f"rounds: is {rounds}, must be at least 1")
    timers = {}
    for name, run in entries.items():
        say(f"warming up {name}")
        timers[name] = graph_timer(run, device) if device.type == "cuda" else _timer(run)
    times: dict[str, list[float]] = {name: [] for name in entries}
    for i in range(rounds):
        for name, timer in timers.items():
            say(f"round {i + 1} of {rounds}: {name}")
            times[name].append(timer())
    return {name: statistics.median(values) for name, values in times.items()}


def readers(device: torch.device, size: int = READ_BYTES) -> tuple[dict[str, Callable[[], object]], int]:
    """Streaming passes over a buffer larger than the caches, and the bytes of each: the fastest is the ceiling."""
    words = zeros((size // 8,), torch.int64, device).fill_(1)
    if device.type == "cuda":
        target = torch.empty_like(words)
        # on a GPU the ceiling is the copy: a reduction of this shape is a kernel of its own to tune
        return {"copy": lambda: target.copy_(words)}, 2 * size
    floats = words.view(torch.float32)
    row = 1 << 12
    return {
        "sum": words.sum,
        "amax": words.view(torch.int32).amax,
        "mv": lambda: torch.mv(floats.view(-1, row), floats[:row]),
    }, size


def compare(
    op: str,
    shape: Mapping[str, int | None],
    entries: Mapping[str, Callable[[], object]],
    bytes_of: Callable[[str], int],
    rounds: int,
    device: torch.device,
    say: Report = silent,
) -> tuple[list[dict[str, Any]], float]:
    """Entries of one shape against the one called `eager`, and the bandwidth in bytes/s measured in the same rounds.

    Returns:
        `[{"op", "shape", "entry", "ms", "ratio_to_eager", "share_of_bandwidth", "bytes"}]`, `ms` a median, the ratio
        above 1 where the entry is faster than eager, the share that of `bytes / ms` in the bandwidth (CPU: the fastest
        of three streaming reads, GPU: a copy).
    """
    passes, read_bytes = readers(device)
    times = medians({**entries, **passes}, rounds, device, say)
    bandwidth = read_bytes / min(times.pop(name) for name in passes) * 1e3
    return [
        {
            "op": op,
            "shape": dict(shape),
            "entry": entry,
            "ms": ms,
            "ratio_to_eager": times["eager"] / ms,
            "share_of_bandwidth": bytes_of(entry) / ms * 1e3 / bandwidth,
            "bytes": bytes_of(entry),
        }
        for entry, ms in times.items()
    ], bandwidth


def report(
    op: str, groups: Iterable[tuple[list[dict[str, Any]], float]], rounds: int, device: torch.device
) -> dict[str, Any]:
    """The results of `compare` and what they were measured on: a dict that `json.dumps` takes."""
    found = list(groups)
    return {
        "cases": [case for cases, _ in found for case in cases],
        "backend": backends.choose(op, device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "bandwidth_gb_s": [bandwidth / 1e9 for _, bandwidth in found],
        "rounds": rounds,
        "commit": commit(),
    }


def compiled(run: Callable[[], object]) -> tuple[Callable[[], object] | None, str | None]:
    """`run` under torch.compile, or the reason why there is none."""
    built = torch.compile(run, fullgraph=True)
    try:
        built()
    except Exception as error:  # a compiler that is missing or fails says so in many types
        return None, f"torch.compile failed: {str(error).splitlines()[0]}"
    return built, None


def commit() -> str | None:
    """Short hash of the checkout the package runs from, with `+` when it has changes; None outside one."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _timer(run: Callable[[], object]) -> Callable[[], float]:
    run()

    def timed() -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    return timed


def graph_timer(
    run: Callable[[], object], device: torch.device, before: Callable[[], object] | None = None
) -> Callable[[], float]:
    """Milliseconds of one replay of `run`, after `before` and with none of its data in the L2 cache."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARMUPS):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    flush = _flush(device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed() -> float:
        assert kept is not NotImplemented  # the graph writes into what the captured run returned
        if before is not None:
            before()
        flush.zero_()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    return timed


@cache
def _flush(device: torch.device) -> torch.Tensor:
    """What is overwritten to empty the L2 cache; many timers share it."""
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
