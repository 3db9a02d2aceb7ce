"""Which implementation of an op runs where, and why not a better one.

Backends: `cuda` and `triton` for CUDA tensors, `cpu` (C++) for CPU tensors, `reference` (eager PyTorch) for any. An op
registers the ones it has and `implementation` picks the first that runs. `use_backend` forces one; under
TRITON_INTERPRET=1 a forced `triton` takes CPU tensors too. The `cpu` backends share one compiled module, `compiled()`.

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
from types import ModuleType
from typing import Any

import torch

from dmtp_kernels._warmup import refuse_compiling_in_capture

NAMES = ("cuda", "triton", "cpu", "reference", "flash")


class BackendUnavailable(RuntimeError):
    """A forced backend does not exist for the op or cannot run on this machine."""


_implementations: dict[str, dict[str, str]] = {}
_loaded: dict[tuple[str, str], Callable[..., None]] = {}
_chosen: dict[tuple[str, str], str] = {}  # (op, device type) -> backend, until a choice changes
_forced: dict[str | None, str] = {}  # op, or None for all of them -> backend
_compiled: ModuleType | str | None = None  # or why there is none


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
    if backend == "cuda" and device.type != "cuda":
        return f"cuda kernels need CUDA tensors, got {device.type}"
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


def choose(op: str, device: torch.device) -> str:
    """Name of the backend that `op` uses on `device` now."""
    forced = _forced.get(op) or _forced.get(None)
    if forced is not None:
        reason = unavailable(op, forced, device)
        if reason is not None:
            raise BackendUnavailable(f"{op}: backend {forced!r} was forced, but {reason}")
        return forced
    order = ("cuda", "triton", "reference") if device.type == "cuda" else ("cpu", "reference")
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
        ValueError: `name` is not one of `reference`, `cpu`, `triton`, `cuda`, `flash`.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"name: no backend {name!r}, must be one of {', '.join(NAMES)}")
    previous = _forced
    kept = {op: backend for op, backend in previous.items() if ops and op not in ops}
    chosen: dict[str | None, str] = dict.fromkeys(ops or (None,), name) if name is not None else {}
    _force(kept | chosen)
    return _restoring(previous)
