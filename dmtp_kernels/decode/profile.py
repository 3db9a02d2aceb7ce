"""Where a round's time goes: its stages, in each the models' share, and one method beside another."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar
from unittest import mock

import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.graphs import GraphRunner
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.ranges import ROUND, TIMED, label, ranged, watched
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES

WARMUP = 16
"""Rounds that the source leaves out of its figures."""

_MODEL_CALLS = ("forward", "logits", "context_keys_values")

Span = tuple[Any, Any]


class StageGraphs(GraphRunner):
    """Graphs of one stage each, so that a stage can be timed."""

    groups: ClassVar[Sequence[tuple[str, ...]]] = tuple((name,) for name in STAGES)


def added_stages(method: Method) -> tuple[str, ...]:
    """The stages that a method adds to DFlash, as the source's overhead table counts them."""
    return ("mtp", "t1") if method.drafter is not None and method.first == "mtp" else ()


class _Clock:
    """Moments on the host, or on the device's stream, and the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, span: Span) -> float:
        start, stop = span
        return float(start.elapsed_time(stop)) if self.cuda else (stop - start) * 1e3

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass
class _Round:
    """Moments of a round in which `seats` sat: its begin and end, the starts of its stages, the models' calls."""

    seats: int
    begin: Any
    end: Any = None
    starts: dict[str, Any] = field(default_factory=dict)
    models: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def span(self) -> Span:
        return self.begin, self.end

    def spans(self) -> dict[str, Span]:
        """A stage lasts until the next one starts, the last until the round ends: nothing lies between them."""
        edges = [self.begin, *list(self.starts.values())[1:], self.end]
        return dict(zip(self.starts, pairwise(edges), strict=True))


class _Stopwatch:
    """Watches the rounds of `engine`, which the caller sets, and the calls of its models."""

    def __init__(self, clock: _Clock, engine: Engine) -> None:
        self.clock, self.engine = clock, engine
        self.rounds: list[_Round] = []
        self._inside: list[Span] = []
        self._depth = 0

    def __call__(self, name: str, text: str) -> AbstractContextManager[None]:
        if name == ROUND:
            return self._round()
        if name in STAGES:
            row, self._inside = self.rounds[-1], []
            row.models[name] = self._inside
            row.starts[name] = self.clock.now()
        return nullcontext()

    @contextmanager
    def _round(self) -> Iterator[None]:
        self.rounds.append(_Round(len(self.engine.seats), self.clock.now()))
        yield
        self.rounds[-1].end = self.clock.now()

    @contextmanager
    def models(self, engines: Sequence[Engine]) -> Iterator[None]:
        """Also times the calls of the models that the engines, or several of them, have."""
        modules = {id(m): m for e in engines for m in (e.stack.target, e.stack.drafter, e.stack.mtp) if m is not None}
        with ExitStack() as patches:
            for module in modules.values():
                for name in _MODEL_CALLS:
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, self._timed(getattr(module, name))))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            start = self.clock.now()
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._inside.append((start, self.clock.now()))

        return run


def profile_rounds(engine: Engine, requests: list[Request], **options: Any) -> dict[str, Any]:
    """`profile_methods` of one engine."""
    return profile_methods([engine], requests, **options)[0]


@torch.no_grad()
def profile_methods(
    engines: Sequence[Engine],
    requests: list[Request],
    *,
    rounds: int = 50,
    warmup: int = WARMUP,
    graphs: bool = False,
) -> list[dict[str, Any]]:
    """Time rounds that decode all of `requests` together, after `warmup` of them, the engines taking turns.

    Rounds at another number of live requests are run and not timed, and each engine has as many timed rounds as the
    others. A stage lasts until the next one starts, so that they add up to the round. Times are of the host, or with
    CUDA between events on the stream, read after the last round. With `graphs` every stage is a CUDA graph of its own
    (without CUDA the same stages run eagerly).

    Returns:
        For each engine `{"method", "round_ms", "round_quartiles_ms", "scale", "stages": {name: {"label", "ms",
        "share", "models_ms"}}, "added": {name: {"label", "ms"}}, "own_ms", "own_share", "rounds", "warmup", "batch",
        "timer", "graphs", "threads", "load"}`; `load` is the machine's over a minute, before and after.
        Names are `STAGES`, labels what the source calls them; `added` repeats `added_stages`. `models_ms` is what the
        target, the drafter and the MTP module take inside a stage, attention and the target's logits included; `own_ms`
        is the rest of the round, draft heads and sampling included. They are None where graphs hide the models' calls.
        All figures are medians over the rounds; those inside a round are multiplied by `scale`, so that the stages add
        up to the median round: 1 but for what stalls single stages, other processes for one.

    Raises:
        ValueError: the requests ended before a round was timed, or there are more of them than rows.
    """
    for engine in engines:
        if len(requests) > engine.max_batch:
            raise ValueError(f"requests: are {len(requests)}, the engine has {engine.max_batch} rows")
        if graphs:
            engine.round_function = engine.graphs = StageGraphs(engine.stack, engine.state, (len(requests),))
            with warnings.catch_warnings():
                # of a stage that the method does not have
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                engine.warmup()
    load = os.getloadavg()[0]
    clock = _Clock(engines[0].device)
    watch = _Stopwatch(clock, engines[0])
    timed: list[list[_Round]] = [[] for _ in engines]

    def turns(goal: int) -> None:
        turn = 0
        while all(engine.busy for engine in engines) and min(map(len, timed)) < goal:
            # no engine is always the one that runs first
            for index in range(len(engines))[:: -1 if turn % 2 else 1]:
                watch.engine, watch.rounds = engines[index], []
                engines[index].step()
                timed[index] += (row for row in watch.rounds if row.seats == len(requests))
            turn += 1

    for engine in engines:
        for request in requests:
            engine.submit(request)
        engine.admit()
    with watched(watch), watch.models(engines):
        turns(warmup)
        ranged(TIMED, turns)(warmup + rounds)
    clock.settle()
    count = min(map(len, timed))
    if count <= warmup:
        raise ValueError(
            f"requests: ended before {warmup + 1} rounds with all {len(requests)} of them; ask for more tokens"
        )
    about: dict[str, Any] = {"rounds": count - warmup, "warmup": warmup, "batch": len(requests)}
    about |= {"timer": "cuda events" if clock.cuda else "perf_counter", "graphs": graphs}
    about |= {"threads": torch.get_num_threads(), "load": [round(x, 2) for x in (load, os.getloadavg()[0])]}
    return [
        _summary(engine.method, clock, rows[warmup:count]) | about for engine, rows in zip(engines, timed, strict=True)
    ]


def _summary(method: Method, clock: _Clock, rows: list[_Round]) -> dict[str, Any]:
    times = sorted(clock.ms(row.span) for row in rows)
    round_ms = statistics.median(times)
    medians = {name: statistics.median(clock.ms(row.spans()[name]) for row in rows) for name in STAGES}
    scale = round_ms / total if (total := sum(medians.values())) else 1.0
    seen = any(any(row.models.values()) for row in rows)
    stages: dict[str, dict[str, Any]] = {}
    for name in STAGES:
        share = scale * medians[name] / round_ms if round_ms else 0.0
        stages[name] = {"label": label(name, method), "ms": scale * medians[name], "share": share}
        models = statistics.median(sum(map(clock.ms, row.models[name])) for row in rows)
        stages[name]["models_ms"] = scale * models if seen else None
    own = round_ms - sum(row["models_ms"] for row in stages.values()) if seen else None
    return {
        "method": method.name,
        "round_ms": round_ms,
        "round_quartiles_ms": [times[len(times) // 4], times[len(times) - 1 - len(times) // 4]],
        "scale": scale,
        "stages": stages,
        "added": {name: {key: stages[name][key] for key in ("label", "ms")} for name in added_stages(method)},
        "own_ms": own,
        "own_share": None if own is None else (own / round_ms if round_ms else 0.0),
    }
