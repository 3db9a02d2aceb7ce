"""Which implementation of an op runs where, and why not a better one.

Backends: `triton` and `cuda` (CUDA C++) for CUDA tensors, `cpu` (C++) for CPU tensors, `reference` (eager PyTorch)
for any. An op registers the ones it has and `implementation` picks the first that runs: `cuda` only where there is no
Triton, since nothing was measured that prefers it. `use_backend` forces one; under TRITON_INTERPRET=1 a forced `triton`
takes CPU tensors too. The `cpu` backends share one compiled module, `compiled()`, the `cuda` backends one library,
`cuda_library()`.

`flash` (an installed FlashAttention) is optional: it runs where it is forced and never by itself. Its module has
`missing(device)`, why it cannot run there, and `refuses(*inputs)`, why it does not take these arguments; both return
None where it can.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dmtp_kernels._warmup import refuse_compiling_in_capture

NAMES = ("triton", "cuda", "cpu", "reference", "flash")


class BackendUnavailable(RuntimeError):
    """A forced backend does not exist for the op or cannot run on this machine."""


_implementations: dict[str, dict[str, str]] = {}
_loaded: dict[tuple[str, str], Callable[..., None]] = {}
_chosen: dict[tuple[str, str], str] = {}  # (op, device type) -> backend, until a choice changes
_forced: dict[str | None, str] = {}  # op, or None for all of them -> backend
_compiled: ModuleType | str | None = None  # or why there is none
_cuda: Any = None  # ops of the CUDA library, or why there is none


def register(op: str, implementations: dict[str, str]) -> None:
    """Record the `"module:function"` of every backend that `op` has."""
    unknown = set(implementations) - set(NAMES)
    if unknown:
        raise ValueError(f"implementations: unknown backend {sorted(unknown)}, must be among {NAMES}")
    _implementations[op] = dict(implementations)
    _chosen.clear()


def unavailable(op: str, backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot run `op` on `device`, or None when it can."""
    if backend not in NAMES:
        return f"no backend named {backend!r}, must be one of {', '.join(NAMES)}"
    if backend not in _implementations.get(op, {}):
        return f"{op} has no {backend} implementation"
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "triton runs CPU tensors only under TRITON_INTERPRET=1"
    if backend == "cuda":
        if device.type != "cuda":
            return f"cuda kernels need CUDA tensors, got {device.type}"
        return cuda_missing()
    if backend == "cpu":
        if device.type != "cpu":
            return f"cpu kernels need CPU tensors, got {device.type}"
        return compiled_missing()
    if backend == "flash":
        return _module(op, backend).missing(device)
    return None


def _module(op: str, backend: str) -> Any:
    return importlib.import_module(_implementations[op][backend].partition(":")[0])


def refusal(op: str, device: torch.device, inputs: Sequence[Any]) -> str | None:
    """Why the backend that `op` uses on `device` does not take `inputs`, which the op's own check has passed."""
    implementation(op, device)
    backend = _chosen[op, device.type]
    return _module(op, backend).refuses(*inputs) if backend == "flash" else None


def compiled() -> ModuleType:
    """The compiled module `dmtp_kernels._C`, loaded at the first call.

    Raises:
        BackendUnavailable: it is not there or does not load; the message says why.
    """
    reason = compiled_missing()
    if reason is not None:
        raise BackendUnavailable(reason)
    assert isinstance(_compiled, ModuleType)
    return _compiled


def compiled_missing() -> str | None:
    """Why there is no compiled module, or None when there is one."""
    global _compiled
    if _compiled is None:
        _compiled = _load_compiled()
    return _compiled if isinstance(_compiled, str) else None


def _load_compiled() -> ModuleType | str:
    try:
        build = importlib.import_module("dmtp_kernels._build")
    except ImportError:
        return "dmtp_kernels._C is missing: nothing was compiled (`make setup` does)"
    if build.MISSING:
        return f"dmtp_kernels._C is missing: {build.MISSING}"
    # a module made for another libtorch may crash instead of failing to load
    if torch.__version__ != build.TORCH:
        return f"dmtp_kernels._C was compiled for torch {build.TORCH}, this is {torch.__version__}: compile it again"
    try:
        return importlib.import_module("dmtp_kernels._C")
    except ImportError as error:
        return f"dmtp_kernels._C does not load: {error}"


def cuda_library() -> Any:
    """The ops of the compiled library `dmtp_kernels/_cuda.so`, loaded at the first call.

    Raises:
        BackendUnavailable: it is not there or does not load; the message says why.
    """
    reason = cuda_missing()
    if reason is not None:
        raise BackendUnavailable(reason)
    return _cuda


def cuda_missing() -> str | None:
    """Why there is no library of CUDA kernels, or None when there is one. It loads on machines without a GPU, too."""
    global _cuda
    if _cuda is None:
        _cuda = _load_cuda()
    return _cuda if isinstance(_cuda, str) else None


def _load_cuda() -> Any:
    try:
        build = importlib.import_module("dmtp_kernels._build")
    except ImportError:
        return "dmtp_kernels/_cuda.so is missing: nothing was compiled (`make setup` does)"
    missing = getattr(build, "NO_CUDA", "it was not asked for")
    if missing:
        return f"dmtp_kernels/_cuda.so is missing: {missing}"
    path = str(Path(str(build.__file__)).with_name("_cuda.so").resolve())
    # a second copy would register the same ops, which ends the process
    if path not in torch.ops.loaded_libraries and hasattr(torch.ops.dmtp_cuda, "draft_pages"):
        return f"dmtp_kernels/_cuda.so does not load: another copy than {path} is loaded"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"dmtp_kernels/_cuda.so does not load: {error}"
    return torch.ops.dmtp_cuda


def choose(op: str, device: torch.device) -> str:
    """Name of the backend that `op` uses on `device` now."""
    forced = _forced.get(op) or _forced.get(None)
    if forced is not None:
        reason = unavailable(op, forced, device)
        if reason is not None:
            raise BackendUnavailable(f"{op}: backend {forced!r} was forced, but {reason}")
        return forced
    order = ("triton", "cuda", "reference") if device.type == "cuda" else ("cpu", "reference")
    for backend in order:
        if unavailable(op, backend, device) is None:
            return backend
    raise BackendUnavailable(f"{op}: nothing runs on {device.type}")


def implementation(op: str, device: torch.device) -> Callable[..., None]:
    """The function that runs `op` on `device`; its module is imported at the first call."""
    backend = _chosen.get((op, device.type))
    if backend is None:
        backend = _chosen[op, device.type] = choose(op, device)
    function = _loaded.get((op, backend))
    if function is None:
        module, _, attribute = _implementations[op][backend].partition(":")
        if backend == "triton":
            refuse_compiling_in_capture()
        function = _loaded[op, backend] = getattr(importlib.import_module(module), attribute)
    return function


def _force(forced: dict[str | None, str]) -> None:
    global _forced
    _forced = forced
    _chosen.clear()


@contextmanager
def _restoring(previous: dict[str | None, str]) -> Iterator[None]:
    try:
        yield
    finally:
        _force(previous)


def use_backend(name: str | None, *ops: str) -> Any:
    """Force one backend for every op, or for the named `ops` alone (None: choose per op again).

    Takes effect at once; used as a context manager it restores the previous choices on exit. A forced op that lacks the
    backend raises `BackendUnavailable` when called. A choice for an op goes before the choice for all.

    Raises:
        ValueError: `name` is not one of `reference`, `cpu`, `triton`, `cuda`, `flash`, or there is no such op.
    """
    for op in ops:
        if op not in _implementations:
            raise ValueError(f"ops: no op {op!r}, must be among {', '.join(sorted(_implementations))}")
    if name is not None and name not in NAMES:
        raise ValueError(f"name: no backend {name!r}, must be one of {', '.join(NAMES)}")
    previous = _forced
    kept = {op: backend for op, backend in previous.items() if ops and op not in ops}
    chosen: dict[str | None, str] = dict.fromkeys(ops or (None,), name) if name is not None else {}
    _force(kept | chosen)
    return _restoring(previous)
