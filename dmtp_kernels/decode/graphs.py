"""A round as CUDA graphs, one set per request count; without CUDA the same stages run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from dmtp_kernels._warmup import warmup
from dmtp_kernels.decode.ranges import ROUND, ranged
from dmtp_kernels.decode.round import STAGES, stage
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import Work, left
from dmtp_kernels.ops.accept import Acceptance

GROUPS = (("t1",), ("draft",), ("verify", "accept"), ("mtp", "commit", "advance"))
"""Stages that share a graph, in order; together `STAGES`."""
MODES = ("exact", "padded")


def graph_sizes(mode: str, max_batch: int) -> tuple[int, ...]:
    """Request counts to capture: `exact` every one to `max_batch`; `padded` 1, 2, 4, multiples of 8, and `max_batch`.

    Exact counts compute nothing for rows that hold no request, buckets capture less and need less memory.

    Raises:
        ValueError: another mode.
    """
    if mode not in MODES:
        raise ValueError(f"graphs: is {mode!r}, must be one of {', '.join(MODES)}")
    if mode == "exact":
        return tuple(range(1, max_batch + 1))
    return tuple(sorted({n for n in (1, 2, 4, *range(8, max_batch, 8)) if n < max_batch} | {max_batch}))


class GraphRunner:
    """Runs rounds of the first rows of a state, whatever their number, with what was prepared for given sizes.

    A round of n requests runs at the smallest size that holds them; rows from n on must be inert (budget 0), which
    `BatchState.clear` leaves them. On CUDA every size is captured once, by `warmup`, one graph for each of `groups`.
    All graphs share one memory pool, and since one round runs at a time the sizes share its memory: what a round leaves
    holds until the next one starts, whatever its size, so copy it on the same stream (`readback.py` does). Graphs read
    page tables, lengths and seeds where the state has them, so nothing is captured again when these change; kernels are
    compiled before the first capture.

    Args:
        stack, state: of one engine; their tensors must stay where they are.
        sizes: request counts, each within the rows of the state.
        guard: context that every eagerly run group of stages is run in, e.g. `testing.capture.capture_safe`.

    Raises:
        ValueError: a size is not within the rows of the state, or there is none.
    """

    groups: ClassVar[Sequence[tuple[str, ...]]] = GROUPS
    """Stages by graph."""

    def __init__(
        self,
        stack: Stack,
        state: BatchState,
        sizes: Sequence[int],
        *,
        guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        rows = state.length.shape[0]
        if not sizes or min(sizes) < 1 or max(sizes) > rows:
            raise ValueError(f"sizes: are {list(sizes)}, must be between 1 and the state's {rows} rows")
        self.stack, self.state, self.guard = stack, state, guard
        self.sizes = tuple(sorted(set(sizes)))
        self.captures = 0
        self._views = {size: state.rows(0, size) for size in self.sizes}
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._results: dict[int, Acceptance] = {}
        self._captured = state.length.is_cuda

    @property
    def ready(self) -> bool:
        """Whether every size can run."""
        return not self._captured or len(self._graphs) == len(self.sizes)

    def size_of(self, live: int) -> int:
        """The size at which `live` requests run.

        Raises:
            ValueError: no size holds them.
        """
        for size in self.sizes:
            if live <= size:
                return size
        raise ValueError(f"view: has {live} rows, the largest prepared size is {self.sizes[-1]}")

    def warmup(self, *, progress: bool = False, capture: bool = True) -> None:
        """Run every size once, which compiles its kernels and makes its buffers, and on CUDA capture it.

        Raises:
            RuntimeError: a row of the state holds a request.
        """
        if bool((self.state.budget > 0).any()):
            raise RuntimeError("warmup: a row holds a request; warm up before the first one joins")
        # the largest first: smaller sizes then find memory for theirs in the pool
        sizes = self.sizes[::-1]
        warmup({f"round of {n}": partial(self._run, self._views[n]) for n in sizes}, progress=progress)
        if self._captured and capture:
            pool = torch.cuda.graph_pool_handle()
            warmup({f"graphs of {n}": partial(self._capture, n, pool) for n in sizes}, progress=progress)

    def __call__(self, stack: Stack, view: BatchState) -> None:
        """Run one round of the rows of `view`, the first rows of the state; leaves `view.work.accepted`, which holds
        until the next round."""
        if stack is not self.stack or view.length.data_ptr() != self.state.length.data_ptr():
            raise ValueError("view: is not made of the first rows of the state this runner was built for")
        live = view.length.shape[0]
        size = self.size_of(live)
        if self._captured and size not in self._graphs:
            raise RuntimeError(f"size {size} was not captured: call warmup first")
        ranged(ROUND, self._replay if self._captured else self._run, stack.method)(self._views[size])
        accepted = self._results[size] if self._captured else left(self._views[size].work.accepted)
        view.work = Work(accepted=Acceptance(*[t[:live] for t in accepted]))

    def _replay(self, view: BatchState) -> None:
        for graph, group in zip(self._graphs[view.length.shape[0]], self.groups, strict=True):
            ranged("+".join(group), graph.replay, self.stack.method)()

    def _run(self, view: BatchState) -> None:
        for group in self.groups:
            with self.guard():
                self._stages(group, view)

    def _stages(self, group: tuple[str, ...], view: BatchState) -> None:
        for name in group:
            stage(name, self.stack.method)(self.stack, view)

    def _capture(self, size: int, pool: Any) -> None:
        view = self._views[size]
        graphs = [torch.cuda.CUDAGraph() for _ in self.groups]
        for graph, group in zip(graphs, self.groups, strict=True):
            with torch.cuda.graph(graph, pool=pool):
                self._stages(group, view)
        # until here `work` kept what one graph leaves for the next; other sizes may have that memory now, and sizes
        # captured before may write where the acceptance lies: it holds for its own round
        self._results[size] = left(view.work.accepted)
        view.work = Work()
        self._graphs[size] = graphs
        self.captures += len(graphs)


assert tuple(name for group in GROUPS for name in group) == STAGES
