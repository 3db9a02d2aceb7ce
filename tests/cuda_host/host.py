"""The CUDA kernels of csrc/cuda on the CPU: threads as fibers, schedules drawn from a seed. Never a GPU's result.

The very `.cu` sources and torch's side of them are compiled by g++ against csrc/testing. `emulated()` makes the ops'
`cuda` backend run that library on CPU tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dmtp_kernels
from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops import _workspace

ROOT = Path(dmtp_kernels.__file__).parents[1]
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "cuda_host"
PROBES = ROOT / "tests" / "cuda_host"
TORCH = Path(torch.__file__).parent
COMPILER = shutil.which("g++")
# products and sums round separately unless the code says FMA, as in the CPU kernels
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-DDMTP_CUDA_HOST")
ACCESS = np.dtype([("address", "u8"), ("bytes", "u4"), ("block", "u4"), ("launch", "u4"), ("store", "u4")])
GLUE_FLAGS = ("-DTORCH_TARGET_VERSION=0x020b000000000000", "-DDMTP_CUDA_LIBRARY=dmtp_cuda_host", "-DDMTP_CUDA_KEY=CPU")


def _objects() -> Iterator[tuple[Path, tuple[str, ...]]]:
    yield from ((source, ()) for source in sorted((CSRC / "testing").glob("*.cpp")))
    yield CSRC / "torch" / "stable" / "cuda.cpp", (*GLUE_FLAGS, f"-isystem{TORCH / 'include'}")
    for source in (*sorted((CSRC / "cuda").glob("*.cu")), *sorted(PROBES.glob("*.cu"))):
        yield source, ()


def _compile(source: Path, flags: Sequence[str], headers: str) -> Path:
    command = [str(COMPILER), *FLAGS, *flags, f"-I{CSRC}", f"-I{CSRC / 'include'}", "-x", "c++", "-c", str(source)]
    key = hashlib.sha256("\0".join([*command, torch.__version__, headers, source.read_text()]).encode()).hexdigest()
    target = CACHE / f"{source.stem}-{key[:16]}.o"
    _make(target, command)
    return target


def _make(target: Path, command: Sequence[str]) -> None:
    if target.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    # other processes may build the same file: the last one to rename wins, and all are alike
    partial = target.with_suffix(f".{os.getpid()}{target.suffix}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    partial.rename(target)


@functools.cache
def library() -> ctypes.CDLL:
    """The harness and all kernels, compiled at the first call; its ops are `torch.ops.dmtp_cuda_host`."""
    if COMPILER is None:
        pytest.skip("no g++ on PATH: the CUDA sources are not compiled for the CPU")
    folders = (CSRC / "cuda", CSRC / "testing", CSRC / "include" / "dmtp", CSRC / "torch" / "stable")
    files = sorted(f for folder in folders for f in folder.iterdir() if f.suffix in (".h", ".cuh"))
    headers = "\0".join(f.read_text() for f in files if f.name != "fiber_state.h")
    own = (CSRC / "testing" / "fiber_state.h").read_text()
    objects = [_compile(s, flags, headers + own * (s.parent.name == "testing")) for s, flags in _objects()]
    key = hashlib.sha256("".join(o.name for o in objects).encode()).hexdigest()
    target = CACHE / f"kernels-{key[:16]}.so"
    _make(target, [str(COMPILER), "-shared", *map(str, objects), f"-L{TORCH / 'lib'}", "-ltorch_cpu"])
    torch.ops.load_library(str(target))
    loaded = ctypes.CDLL(str(target))
    loaded.dmtp_host_barriers.restype = ctypes.c_char_p
    loaded.dmtp_host_launches.restype = ctypes.c_uint64
    loaded.dmtp_host_seed.argtypes = [ctypes.c_uint64]
    loaded.dmtp_host_without.argtypes = [ctypes.c_char_p]
    loaded.dmtp_host_accesses.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    loaded.dmtp_host_accesses.restype = ctypes.c_uint64
    return loaded


def seed(value: int) -> None:
    """Which schedule the next launches get: 0 and 1 are the order of the threads and its reverse."""
    library().dmtp_host_seed(value)


def launches() -> int:
    """Kernels launched since the last `seed`."""
    return int(library().dmtp_host_launches())


def barriers() -> list[str]:
    """`file.cu:line` of every barrier that a thread has met since the last call."""
    found: str = library().dmtp_host_barriers().decode()
    return found.split()


@contextmanager
def without(barrier: str) -> Iterator[None]:
    """As if the sources had no barrier at `file.cu:line`."""
    library().dmtp_host_without(barrier.encode())
    try:
        yield
    finally:
        library().dmtp_host_without(None)
        _workspace._buffers.clear()  # a launch that failed leaves its counters where they were


def _accesses() -> np.ndarray[Any, Any]:
    first = ctypes.c_void_p()
    count = library().dmtp_host_accesses(ctypes.byref(first))
    return np.frombuffer(ctypes.string_at(first, count * ACCESS.itemsize), ACCESS)


@contextmanager
def recorded() -> Iterator[Callable[[], np.ndarray[Any, Any]]]:
    """What the kernels read and write in global memory by `load_global` and the like, in the order in which they do.

    Yields a function that gives the accesses so far, until the next recording: `address`, `bytes`, linear `block`,
    `launch` (0 is the first) and `store` (0 or 1) of each. Copies to shared memory count what they read.
    """
    library().dmtp_host_record(1)
    try:
        yield _accesses
    finally:
        library().dmtp_host_record(0)


@contextmanager
def processors(count: int) -> Iterator[None]:
    """As if the device had this many multiprocessors; 132 else."""
    library().dmtp_host_processors(count)
    try:
        yield
    finally:
        library().dmtp_host_processors(132)


@contextmanager
def accepted(*ops: str) -> Iterator[None]:
    """The `cuda` backend of `ops` takes CPU tensors, on fibers, where it is asked for."""
    library()
    usual = backends.unavailable

    def unavailable(op: str, backend: str, device: torch.device) -> str | None:
        if backend == "cuda" and op in ops and device.type == "cpu" and "cuda" in backends._implementations[op]:
            return None
        return usual(op, backend, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "unavailable", unavailable)
        patch.setattr(backends, "_cuda", torch.ops.dmtp_cuda_host)
        yield


@contextmanager
def emulated(*ops: str) -> Iterator[None]:
    """As `accepted`, and it is what `ops` run."""
    with accepted(*ops), use_backend("cuda", *ops):
        yield
