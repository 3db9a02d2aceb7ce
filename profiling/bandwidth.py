"""Memory bandwidth of this machine, measured: `python -m profiling.bandwidth`. The ceiling of a pass over a head.

Machines are shared and throttle: measure in the run that the figure is compared with, and never compare two runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dmtp_kernels._cli_options import set_threads
from profiling.command import Parser, command
from profiling.table import table

CPU_BYTES = 1 << 29
"""At least; four times the last level cache where that is more, at most an eighth of the memory."""
CUDA_BYTES = 1 << 31
_ROW = 1 << 14
_LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def read_bandwidth(device: torch.device | str = "cpu", *, nbytes: int | None = None, rounds: int = 7) -> float:
    """Bytes read per second by the fastest of several reductions over `nbytes`, the best of `rounds`.

    On a CPU with torch's current number of threads. On a GPU a reduction is a kernel of its own to tune and may fall
    short of the memory: `copy_bandwidth` is the ceiling there.
    """
    # written: pages that nobody wrote are one and the same page; zeros: no denormal numbers
    words = torch.ones((nbytes or _size(device)) // _ROW * _ROW // 8, dtype=torch.int64, device=device).zero_()
    floats = words.view(torch.float32)
    doubles, integers = words.view(torch.float64), words.view(torch.int32)
    readers: list[Callable[[], object]] = [
        words.sum,
        floats.sum,
        doubles.sum,
        integers.amax,
        lambda: torch.mv(floats.view(-1, _ROW // 4), floats[: _ROW // 4]),
    ]
    return words.nbytes / min(best_seconds(read, words.device, rounds) for read in readers)


def copy_bandwidth(device: torch.device | str = "cpu", *, nbytes: int | None = None, rounds: int = 7) -> float:
    """Bytes read plus bytes written per second by a copy of `nbytes`, the best of `rounds`."""
    source = torch.ones((nbytes or _size(device)) // 8, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), source.device, rounds)


def _size(device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        return CUDA_BYTES
    try:
        cache = int(_LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        cache = 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(CPU_BYTES, min(4 * cache, memory // 8))


def best_seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest of `rounds` runs after one that is not timed."""
    run()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return min(times)


@command("profiling.bandwidth")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with a message for an option that means nothing."""
    parser = Parser(prog="python -m profiling.bandwidth", description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, help="threads of the CPU figure; default torch's")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        set_threads(options.threads, option="--threads", least=1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = [
        (
            torch.cuda.get_device_name() if device == "cuda" else device,
            None if device == "cuda" else torch.get_num_threads(),
            read_bandwidth(device),
            copy_bandwidth(device),
        )
        for device in devices
    ]
    if options.json:
        print(
            json.dumps([dict(zip(("device", "threads", "read", "copy"), row, strict=True)) for row in rows], indent=1)
        )
    else:
        text = [(*row[:2], row[2] / 1e9, row[3] / 1e9) for row in rows]
        print(table(("device", "threads", "read GB/s", "copy GB/s (read + written)"), text))
        if len(rows) == 1:
            print("GPU: not measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
