"""Names round a round and each of its stages, for whoever watches: NVTX (nsys, ncu), a torch profiler, a caller.

Where nobody watches, a stage is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from dmtp_kernels.decode.method import Method

try:
    import nvtx
except ImportError:
    nvtx = None

DOMAIN = "dmtp"
"""NVTX domain of every range here."""
ROUND, TIMED = "round", "timed_rounds"
"""Names of the range that holds a round's stages, and of the one that holds the rounds `dmtp profile` times."""

_LABELS = {
    "t1": "T1 selection+embedding+fusion",
    "draft": "DFlash",
    "mtp": "MTP advance",
    "advance": "round advance",
}

Watcher = Callable[[str, str], AbstractContextManager[Any]]
"""`watcher(name, label)`: the context that a range called `name`, `label` to a reader, runs in."""

_watchers: list[Watcher] = []
_profiled = torch.autograd._profiler_enabled


def label(name: str, method: Method | None = None) -> str:
    """What the source calls a range: of a stage, of stages joined by `+` that share a graph, or of a round.

    Methods without T1 from MTP, or without a drafter, do something else in the stages `t1` and `draft`.
    """
    if "+" in name:
        return ", ".join(label(part, method) for part in name.split("+"))
    if method is not None and method.drafter is None:
        others = {"t1": "T1 selection", "draft": "MTP chain"} if method.chain else {"t1": "t1", "draft": "draft"}
    else:
        others = {"t1": "block embedding"} if method is not None and method.first == "drafter" else {}
    return others.get(name) or _LABELS.get(name, name)


def nvtx_ranges(on: bool) -> None:
    """Turn the NVTX ranges on (the default, where the package `nvtx` is installed) or off, for the whole process."""
    while _nvtx_range in _watchers:
        _watchers.remove(_nvtx_range)
    # a tool is injected when the process starts; without one the package hands out a domain that does nothing. Releases
    # before 0.2.11 have no domains to ask
    if on and hasattr(nvtx, "get_domain") and nvtx.get_domain(DOMAIN).get_event_attributes(message=ROUND) is not None:
        _watchers.insert(0, _nvtx_range)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for every range, innermost of all, while the context lasts."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def ranged(name: str, function: Callable[..., Any], method: Method | None = None) -> Callable[..., Any]:
    """`function`, run in the ranges called `name` of whoever watches now; itself where nobody does."""
    if not _watchers and not _profiled():
        return function
    watchers = [_torch_record, *_watchers] if _profiled() else [*_watchers]
    return partial(_inside, watchers, name, label(name, method), function)


def _inside(watchers: list[Watcher], name: str, text: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with ExitStack() as ranges:
        for watcher in watchers:
            ranges.enter_context(watcher(name, text))
        return function(*arguments)


@lru_cache(None)
def _annotation(text: str) -> AbstractContextManager[Any]:
    return nvtx.annotate(text, domain=DOMAIN)


def _nvtx_range(name: str, text: str) -> AbstractContextManager[Any]:
    return _annotation(text)


def _torch_record(name: str, text: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(text)


nvtx_ranges(True)
