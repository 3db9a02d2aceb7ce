"""Compiling before it matters: kernels are compiled at their first call, which must not come inside a graph capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


class CompileDuringCapture(RuntimeError):
    """A kernel was called for the first time while a CUDA graph was being captured."""


def warmup(calls: Mapping[str, Callable[[], object]], *, progress: bool = False) -> dict[str, float]:
    """Run each call once, outside any capture: its kernels are compiled, its scratch is allocated.

    Triton compiles a kernel per dtype, layout option and divisibility of strides, so a call must look like those of the
    capture: the same shapes, dtypes and options, made with the same buffers where that is easy. On CUDA all calls run
    on a stream of their own and the device is waited for at the end.

    Args:
        calls: what to run, by the name shown while it runs.
        progress: show a progress bar on standard error.

    Returns:
        Seconds that each call took on the host.

    Raises:
        TypeError: `calls` is no mapping of names to functions.
        CompileDuringCapture: the current stream is being captured.
    """
    if not isinstance(calls, Mapping) or not all(map(callable, calls.values())):
        raise TypeError(f"calls: is {calls!r}, must be a mapping of names to functions")
    if _capturing():
        raise CompileDuringCapture("warmup: a CUDA graph is being captured; warm up before")
    on_device = torch.cuda.is_initialized()
    seconds = {}
    with _progress(len(calls), progress) as (show, step):
        for name, call in calls.items():
            show(name)
            start = time.perf_counter()
            if on_device:
                _on_side_stream(call)
            else:
                call()
            seconds[name] = time.perf_counter() - start
            step()
    return seconds


def _capturing() -> bool:
    # a torch without CUDA raises when asked
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _on_side_stream(call: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


class _progress:
    def __init__(self, total: int, shown: bool) -> None:
        self.bar: Any = None
        self.total = total
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> tuple[Callable[[str], None], Callable[[], None]]:
        if self.bar is None:
            return (lambda name: None), (lambda: None)
        self.bar.start()
        task = self.bar.add_task("warm-up", total=self.total)
        return (lambda name: self.bar.update(task, description=name)), (lambda: self.bar.advance(task))

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


_installed = False


def refuse_compiling_in_capture() -> None:
    """Have Triton raise `CompileDuringCapture` where it would compile a kernel of this package inside a capture."""
    global _installed
    if _installed:
        return
    from triton import knobs

    previous = knobs.runtime.jit_cache_hook

    def hook(*arguments: Any, fn: Any, **named: Any) -> Any:
        if fn.module.startswith("dmtp_kernels.") and _capturing():
            raise CompileDuringCapture(
                f"{fn.name}: was not compiled for these arguments before the capture; call the op once with the same "
                "shapes, dtypes and strides, or use dmtp_kernels.warmup"
            )
        return None if previous is None else previous(*arguments, fn=fn, **named)

    knobs.runtime.jit_cache_hook = hook
    _installed = True
