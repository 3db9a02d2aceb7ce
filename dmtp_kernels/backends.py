"""Which implementation of an op runs where, and why not a better one.

Backends: `cuda` and `triton` for CUDA tensors, `cpu` (C++) for CPU tensors, `reference` (eager PyTorch) for any. An op
registers the ones it has and `implementation` picks the first that runs. `use_backend` forces one; under
TRITON_INTERPRET=1 a forced `triton` takes CPU tensors too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAMES = ("cuda", "triton", "cpu", "reference")


class BackendUnavailable(RuntimeError):
    """A forced backend does not exist for the op or cannot run on this machine."""


_implementations: dict[str, dict[str, str]] = {}
_loaded: dict[tuple[str, str], Callable[..., None]] = {}
_forced: str | None = None


def register(op: str, implementations: dict[str, str]) -> None:
    """Record the `"module:function"` of every backend that `op` has."""
    unknown = set(implementations) - set(NAMES)
    if unknown:
        raise ValueError(f"implementations: unknown backend {sorted(unknown)}, must be among {NAMES}")
    _implementations[op] = dict(implementations)


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
    if backend == "cpu" and device.type != "cpu":
        return f"cpu kernels need CPU tensors, got {device.type}"
    return None


def choose(op: str, device: torch.device) -> str:
    """Name of the backend that `op` uses on `device` now."""
    if _forced is not None:
        reason = unavailable(op, _forced, device)
        if reason is not None:
            raise BackendUnavailable(f"{op}: backend {_forced!r} was forced, but {reason}")
        return _forced
    order = ("cuda", "triton", "reference") if device.type == "cuda" else ("cpu", "reference")
    for backend in order:
        if unavailable(op, backend, device) is None:
            return backend
    raise BackendUnavailable(f"{op}: nothing runs on {device.type}")


def implementation(op: str, device: torch.device) -> Callable[..., None]:
    """The function that runs `op` on `device`; its module is imported at the first call."""
    backend = choose(op, device)
    function = _loaded.get((op, backend))
    if function is None:
        module, _, attribute = _implementations[op][backend].partition(":")
        function = _loaded[op, backend] = getattr(importlib.import_module(module), attribute)
    return function


@contextmanager
def _restoring(previous: str | None) -> Iterator[None]:
    global _forced
    try:
        yield
    finally:
        _forced = previous


def use_backend(name: str | None) -> Any:
    """Force one backend for every op (None: choose per op again).

    Takes effect at once; used as a context manager it restores the previous choice on exit. An op that lacks the
    backend raises `BackendUnavailable` when called.

    Raises:
        ValueError: `name` is not one of `reference`, `cpu`, `triton`, `cuda`.
    """
    global _forced
    if name is not None and name not in NAMES:
        raise ValueError(f"name: no backend {name!r}, must be one of {', '.join(NAMES)}")
    previous, _forced = _forced, name
    return _restoring(previous)
