"""`dmtp bench ops`: every op at serving size against eager PyTorch, with all samples kept for `profiling.compare`."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dmtp_kernels.bench.agree import disagreement
from dmtp_kernels.bench.cases import BenchCase, Problem, Suite
from dmtp_kernels.bench.environment import environment
from dmtp_kernels.bench.measure import READ_BYTES, compiled, readers
from dmtp_kernels.bench.progress import Report, silent
from dmtp_kernels.bench.turns import Controls, Pair, Plant, Timer, pair

KIND = "dmtp bench ops"
ENTRIES = ("op", "eager", "compiled")
_BASELINE_SECONDS = 4.0
_FEWEST, _REPEATS = 3, 3
_HELD = 3
_REPACK = 16  # from this scale on weights are made anew with the other inputs


@dataclass
class Row:
    """What is known of one case: samples by turn, of the op and of its control; of the baselines one a turn."""

    case: BenchCase
    backend: str
    eager_is: str
    floor_bytes: int
    disagreement: str | None
    control: str = ""
    op: list[list[float]] = field(default_factory=list)
    around: list[list[float]] = field(default_factory=list)
    baselines: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def as_dict(self, bandwidth: float | None) -> dict[str, Any]:
        samples = [ms for turn in self.op for ms in turn]
        entries: dict[str, Any] = {"op": _summary(samples) | {"samples": [_rounded(turn) for turn in self.op]}}
        for name, values in self.baselines.items():
            entries[name] = _summary(values) | {"samples": _rounded(values)}
        speed = self.floor_bytes / statistics.median(samples) * 1e3
        return {
            "op": self.case.op,
            "case": self.case.name,
            "shape": self.case.shape,
            "backend": self.backend,
            "eager_is": self.eager_is,
            "floor_bytes": self.floor_bytes,
            "agrees": self.disagreement is None,
            "disagreement": self.disagreement,
            "entries": entries,
            "control": {"is": self.control, "samples": [_rounded(turn) for turn in self.around]},
            "speedup": {name: _summary(values) for name, values in self.ratios.items()},
            "skipped": self.skipped,
            "share_of_bandwidth": None if bandwidth is None else speed / bandwidth,
        }


class Session:
    """All cases at hand, for turns in any order: `seat`, then `turn(i)` for the cases, again and again, and `report`.

    A seating is a set of inputs; where they lie moves times by several percent, so a session should have a few.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        scale: int = 1,
        clock: str | None = None,
        device: torch.device | None = None,
        say: Report = silent,
        plant: Plant | None = None,
    ) -> None:
        self.names, self.scale, self.say, self.plant = names, scale, say, plant
        self.device = device or torch.device("cpu")
        self.clock = _clock(clock, self.device)
        self.rows: dict[tuple[str, str], Row] = {}
        self.seatings = 0
        self.load = [os.getloadavg()[0]]
        self._suite = Suite(self.device, scale)
        self._controls = Controls(self.device)
        self._sizes = random.Random(os.getpid())
        self._held: deque[tuple[Suite, torch.Tensor]] = deque(maxlen=_HELD)
        self._seated: list[tuple[Row, Problem, Pair, dict[str, Timer]]] = []
        self._reads: list[Timer] = []
        self._read_bytes = 0

    def seat(self, entries: Sequence[str] = ()) -> int:
        """Make the inputs anew, the first time also compare the outputs with the reference; how many cases there are.

        `entries`: baselines that `turn` runs too.
        """
        self._seated = []
        # memory that was freed would be given out again: what is held moves the new inputs to other pages
        size = self._sizes.randrange(1 << 20, 1 << 25)
        self._held.append((self._suite, torch.ones(size, dtype=torch.uint8, device=self.device)))
        if self.scale >= _REPACK:
            self._suite = Suite(self.device, self.scale)
        for case in self._suite.cases(self.names):
            key = (case.op, case.name)
            self.say(f"{case.op} {case.name}: inputs, outputs, warm-up")
            problem = case.load()
            if key not in self.rows:
                verdict = disagreement(problem)
                self.rows[key] = Row(case, problem.backend, problem.eager_is, problem.floor_bytes, verdict)
            row = self.rows[key]
            others = _baselines(problem, entries, self.clock, row.skipped) if entries else {}
            one = pair(problem, self._controls, self.clock, self.plant)
            row.control = one.name
            self._seated.append((row, problem, one, others))
        self.seatings += 1
        return len(self._seated)

    def turn(self, index: int) -> None:
        """Samples of one case."""
        row, problem, one, others = self._seated[index]
        self.say(f"seating {self.seatings}, turn {len(row.op) + 1}: {row.case.op} {row.case.name}")
        ms = one.turn()
        row.op.append(one.op.samples)
        row.around.append(one.control.samples)
        one.op.samples, one.control.samples = [], []
        for name, timer in others.items():
            taken = row.baselines.setdefault(name, [])
            if len(taken) < _FEWEST or sum(taken) / 1e3 < _BASELINE_SECONDS:
                taken.append(statistics.median(timer.sample() for _ in range(_REPEATS if timer.warm else 1)))
                row.ratios.setdefault(name, []).append(taken[-1] / ms)
        problem.reset()

    def read(self) -> None:
        """One more sample of the memory's bandwidth."""
        if not self._reads:
            passes, self._read_bytes = readers(self.device, max(READ_BYTES // self.scale, 1 << 22))
            self._reads = [Timer(run, self.clock, self.device) for run in passes.values()]
        for timer in self._reads:
            timer.sample()

    def report(self) -> dict[str, Any]:
        """A dict for `json.dumps`; the keys are described in profiling/benchmarks.md."""
        bandwidth = None
        if self._reads:
            bandwidth = self._read_bytes / min(statistics.median(t.samples) for t in self._reads) * 1e3
        load = [*self.load, os.getloadavg()[0]]
        return {
            "kind": KIND,
            "environment": environment(self.device, self.clock, self.scale) | {"load": load},
            "tests": None,
            "session": None,
            "seatings": self.seatings,
            "bandwidth_gb_s": None if bandwidth is None else bandwidth / 1e9,
            "cases": [row.as_dict(bandwidth) for row in self.rows.values()],
        }


def bench_ops(
    names: Sequence[str] | None = None,
    *,
    rounds: int = 15,
    seconds: float = 0.0,
    scale: int = 1,
    entries: Sequence[str] = ("op", "eager"),
    clock: str | None = None,
    device: torch.device | None = None,
    say: Report = silent,
    plant: Plant | None = None,
) -> dict[str, Any]:
    """Time ops at serving size.

    Args:
        names: ops, default all.
        rounds: turns of a seating; a turn runs every entry of every case. A baseline whose samples have taken four
            seconds stops at three; only the first seating has baselines.
        seconds: further seatings, with inputs made anew, are begun for so long.
        scale: divides vocabulary, history and window.
        entries: among `ENTRIES`; `op` always runs.
        clock: `cpu` or `wall`; default `cpu` on one thread, else `wall`. A CUDA device has its own.
        device: default CPU.
        say: told what is being done.
        plant: see `turns.Plant`; a test's way to make an op slower.

    Returns:
        As `Session.report`.

    Raises:
        ValueError: an unknown op, entry or clock, or a number that means nothing.
    """
    if rounds < 1:
        raise ValueError(f"rounds: is {rounds}, must be at least 1")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: is {seconds}, must be at least 0 and finite")
    unknown = [e for e in entries if e not in ENTRIES]
    if unknown:
        raise ValueError(f"entries: has {unknown[0]!r}, must be among {', '.join(ENTRIES)}")
    end = time.monotonic() + seconds
    session = Session(names, scale, clock, device, say, plant)
    while session.seatings == 0 or time.monotonic() < end:
        count = session.seat(() if session.seatings else entries)
        for _ in range(rounds):
            for i in range(count):
                session.turn(i)
            if session.seatings == 1:
                session.read()
    return session.report()


def _baselines(problem: Problem, entries: Sequence[str], clock: str, skipped: dict[str, str]) -> dict[str, Timer]:
    before = problem.reset if problem.mutated else None
    found = {}
    for entry in ENTRIES[1:]:
        if entry not in entries:
            skipped[entry] = "not asked for"
            continue
        run = problem.eager()
        if entry == "compiled":
            built, reason = compiled(run)
            if built is None:
                skipped[entry] = str(reason)
                continue
            run = built
        try:
            found[entry] = Timer(run, clock, problem.device, before)
        except RuntimeError as error:  # a chain that waits for the host cannot be captured
            skipped[entry] = str(error).splitlines()[0]
    return found


def _clock(clock: str | None, device: torch.device) -> str:
    if device.type == "cuda":
        return "events"
    if clock not in (None, "cpu", "wall"):
        raise ValueError(f"clock: is {clock!r}, must be cpu or wall")
    if clock == "cpu" and torch.get_num_threads() > 1:
        raise ValueError(f"clock: is 'cpu', must be wall with {torch.get_num_threads()} threads")
    return clock or ("cpu" if torch.get_num_threads() == 1 else "wall")


def _summary(values: Sequence[float]) -> dict[str, Any]:
    first, middle, third = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return dict(zip(("median", "q1", "q3"), _rounded((middle, first, third)), strict=True))


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]
