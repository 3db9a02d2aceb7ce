"""What a benchmark ran on, and whether the ops' tests pass there."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels import __version__, backends
from dmtp_kernels._cli_options import set_threads
from dmtp_kernels.bench.measure import commit


def open_device(name: str, threads: int) -> torch.device:
    """The device of that name, after torch was given so many CPU threads; 0 is torch's own choice.

    Raises:
        ValueError: no such device here, or a number of threads that is not allowed.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ValueError(f"device: is {name!r}, must be cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: is {name!r}, no CUDA device is visible")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: is {name!r}, there are {torch.cuda.device_count()} CUDA devices")
    set_threads(threads)
    return device


def environment(device: torch.device, clock: str, scale: int) -> dict[str, Any]:
    """What two runs must share to be compared, and the commit, which they need not."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    cuda = device.type == "cuda"
    compiled_module = None if backends.compiled_missing() is not None else backends.compiled()
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "clock": clock,
        "scale": scale,
        "capability": compiled_module.capability() if compiled_module is not None and not cuda else None,
        "versions": {
            "dmtp_kernels": __version__,
            "torch": torch.__version__,
            "triton": triton_version,
            "python": platform.python_version(),
        },
        "commit": commit(),
    }


def run_tests(names: Sequence[str] | None) -> dict[str, Any]:
    """Run the ops' tests, in the checkout that this package is in, and say how they went."""
    root = Path(__file__).parents[2]
    words = " or ".join(_test_word(n) for n in names) if names else ""
    command = [sys.executable, "-m", "pytest", "tests/ops", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-k", words] if words else []
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    summary = lines[-1] if lines else done.stderr.strip()[-200:]
    return {"passed": done.returncode == 0, "command": " ".join(command[1:]), "summary": summary}


def _test_word(op: str) -> str:
    family = backends._implementations[op]["reference"].split(".")[2]
    return {"commit_kv": "commit", "draft_pages": "draft_page"}.get(family, family)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
