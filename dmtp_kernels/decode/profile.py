"""Where a round's time goes: its stages, and in each the models' share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES, stage
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState

_MODEL_CALLS = ("forward", "logits", "context_keys_values")


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

    def ms(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) if self.cuda else (stop - start) * 1e3

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@torch.no_grad()
def profile_rounds(engine: Engine, requests: list[Request], *, rounds: int = 50, warmup: int = 10) -> dict[str, Any]:
    """Time rounds that decode all of `requests` together, after `warmup` of them.

    Rounds at another number of live requests are run and not timed. Medians over the timed rounds.

    Returns:
        `{"round_ms", "stages": {name: {"ms", "models_ms"}}, "own_ms", "own_share", "rounds", "batch"}`: `models_ms` is
        what the target, the drafter and the MTP module take inside a stage, attention and the target's logits included;
        `own_ms` is the rest of the round, draft heads and sampling included; the share is own_ms over round_ms. Means
        of stages are scaled so that they add up to the median round.

    Raises:
        ValueError: the requests ended before a round was timed, or there are more of them than rows.
    """
    if len(requests) > engine.max_batch:
        raise ValueError(f"requests: are {len(requests)}, the engine has {engine.max_batch} rows")
    clock = _Clock(engine.device)
    inside: list[tuple[Any, Any]] = []
    timed: list[dict[str, tuple[float, float]]] = []

    def timed_round(stack: Stack, state: BatchState) -> None:
        marks = []
        for name in STAGES:
            inside.clear()
            start = clock.now()
            stage(name)(stack, state)
            marks.append((name, start, clock.now(), list(inside)))
        if len(engine.seats) < len(requests):
            return
        clock.settle()
        timed.append({n: (clock.ms(a, b), sum(clock.ms(*pair) for pair in pairs)) for n, a, b, pairs in marks})

    for request in requests:
        engine.submit(request)
    engine.admit()
    with mock.patch.object(engine, "round_function", timed_round), _timed_models(engine.stack, clock, inside):
        while engine.busy and len(timed) < warmup + rounds:
            engine.step()
    del timed[:warmup]
    if not timed:
        raise ValueError(
            f"requests: ended before {warmup + 1} rounds with all {len(requests)} of them; ask for more tokens"
        )
    totals = [sum(ms for ms, _ in row.values()) for row in timed]
    round_ms = statistics.median(totals)
    scale = round_ms / statistics.fmean(totals)
    stages = {
        name: {
            "ms": scale * statistics.fmean(row[name][0] for row in timed),
            "models_ms": scale * statistics.fmean(row[name][1] for row in timed),
        }
        for name in STAGES
    }
    own = statistics.median(sum(ms - models for ms, models in row.values()) for row in timed)
    return {
        "round_ms": round_ms,
        "stages": stages,
        "own_ms": own,
        "own_share": statistics.median(
            sum(ms - models for ms, models in row.values()) / total for row, total in zip(timed, totals, strict=True)
        ),
        "rounds": len(timed),
        "batch": len(requests),
    }


@contextmanager
def _timed_models(stack: Stack, clock: _Clock, inside: list[tuple[Any, Any]]) -> Iterator[None]:
    depth = 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            depth += 1
            start = clock.now()
            try:
                return function(*arguments, **named)
            finally:
                depth -= 1
                if depth == 0:
                    inside.append((start, clock.now()))

        return run

    with ExitStack() as patches:
        for module in (stack.target, stack.drafter, stack.mtp):
            for name in _MODEL_CALLS:
                if module is not None and hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, timed(getattr(module, name))))
        yield
