"""Samples of an op beside a control: a fixed workload of the same character, which no commit of this package changes.

On a shared machine the speed of the same code moves by more than a change is worth. Samples are short, so that many of
them meet neither another process nor what it left in the caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dmtp_kernels.bench.cases import Problem
from dmtp_kernels.bench.measure import graph_timer
from dmtp_kernels.ops._pages import zeros

CLOCKS = ("cpu", "wall", "events")
PIECE_SECONDS = 1e-4
"""A sample repeats what is shorter; its time is that of one call."""
MOST_CALLS = 200
_TURN_SECONDS = 5e-3  # of samples in a turn; a call that takes less is made once before it is timed
_FEWEST, _MOST = 2, 10
_CACHED = 1 << 24  # bytes; what moves more is bound by memory, whatever its character in the caches

Plant = Callable[[str, float], None]
"""Called inside the timed part with the op's name and the seconds of the sample so far."""


@dataclass
class Timer:
    """Milliseconds of one call of `run`, by one of `CLOCKS`.

    `cpu` is the processor time of this process: other processes that take the processor do not count, and neither does
    waiting, so it fits one thread only. `events` are a GPU's, around a replayed graph with a cold L2 cache.
    """

    run: Callable[[], object]
    clock: str
    device: torch.device
    before: Callable[[], object] | None = None
    plant: Callable[[float], None] | None = None
    calls: int = 1
    warm: bool = False
    samples: list[float] = field(default_factory=list)
    _replay: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        if self.clock == "events":
            self._replay = graph_timer(self.run, self.device, self.before)
            return
        self.run()
        for _ in range(2):  # the first guess is made with cold caches
            once = self._seconds() / self.calls
            self.calls = max(1, min(MOST_CALLS, math.ceil(PIECE_SECONDS / max(once, 1e-9))))
        self.warm = once < _TURN_SECONDS

    def _seconds(self) -> float:
        now = time.process_time if self.clock == "cpu" else time.perf_counter
        if self.before is not None:
            self.before()
        run = self.run
        if self.warm:
            run()
        start = now()
        for _ in range(self.calls):
            run()
        if self.plant is not None:
            self.plant(now() - start)
        return now() - start

    def sample(self) -> float:
        """Take one sample and keep it."""
        ms = self._replay() if self._replay is not None else self._seconds() / self.calls * 1e3
        self.samples.append(ms)
        return ms


class Controls:
    """The control workloads of one device.

    `memory` adds up a buffer that no cache holds, `compute` multiplies matrices that stay in the caches, `dispatch`
    makes calls that do next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._a, self._b = (torch.ones(64, 256, device=device), torch.ones(256, 256, device=device))
        self._c = torch.empty(64, 256, device=device)
        self._few = [torch.ones(8, device=device) for _ in range(3)]
        self._words: torch.Tensor | None = None

    def of(self, character: str, floor_bytes: int) -> tuple[str, Callable[[], object]]:
        """What the control of a case is, in words that two runs must agree on, and the workload."""
        if floor_bytes > _CACHED:
            if self._words is None:
                self._words = zeros((1 << 25,), torch.int64, self.device)
            words = self._words[: 1 << 22]
            return f"sum of {words.nbytes} bytes", words.sum
        if character != "dispatch":
            a, b, c = self._a, self._b, self._c
            return "fp32 product of 64 x 256 and 256 x 256", lambda: torch.mm(a, b, out=c)
        x, y, z = self._few

        def calls() -> None:
            for _ in range(8):
                torch.add(x, y, out=z)

        return "eight sums of 8 elements", calls


@dataclass
class Pair:
    """An op and its control, sampled side by side; `pieces` of each a turn."""

    op: Timer
    control: Timer
    name: str
    pieces: int = _MOST

    def turn(self) -> float:
        """Samples of both in turns; gives the median of the op's."""
        for _ in range(self.pieces):
            self.control.sample()
            self.op.sample()
        return statistics.median(self.op.samples[-self.pieces :])


def pair(problem: Problem, controls: Controls, clock: str, plant: Plant | None = None) -> Pair:
    """The timers of a case."""
    name, workload = controls.of(problem.case.character, problem.floor_bytes)
    before = problem.reset if problem.mutated else None
    hook = None if plant is None else lambda seconds: plant(problem.case.op, seconds)
    op = Timer(problem.fused(), clock, problem.device, before, hook)
    once = op.sample() * op.calls / 1e3
    op.samples = []
    pieces = max(_FEWEST, min(_MOST, round(_TURN_SECONDS / max(once, 1e-9))))
    return Pair(op, Timer(workload, clock, problem.device), name, pieces)
