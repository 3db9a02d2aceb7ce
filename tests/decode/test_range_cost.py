"""What the ranges cost a round while nobody watches; `pytest -s` prints the figures."""

from __future__ import annotations

import gc
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.ranges import ROUND, ranged
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from dmtp_kernels.models.checkpoint import load_checkpoint

Wrapper = Callable[..., Callable[..., Any]]


def bare(name: str, function: Callable[..., Any], method: Any = None) -> Callable[..., Any]:
    return function


def late(name: str, function: Callable[..., Any], method: Any = None) -> Callable[..., Any]:
    """5 % of a 10 ms round, over its eight ranges."""
    until = time.thread_time() + 0.0005 / 8
    while time.thread_time() < until:
        pass
    return function


@contextmanager
def still() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def middle(values: list[float]) -> list[float]:
    quarter = len(values) // 4
    return sorted(values)[quarter : len(values) - quarter]


@torch.no_grad()
def share_of_a_round(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch, turns: int = 60) -> tuple[float, float, float]:
    """`(share, standard error, ms of a round)` of the thread's time that `wrapper` adds to rounds without ranges.

    Rounds with it and without take turns, in the order ABBA and then BAAB, so that neither gains from coming first or
    from a machine that gets busier. Mean over the middle half of the turns.
    """
    engine = Engine(load_checkpoint(drafters=["dmtp"]), "dmtp", max_batch=1, max_tokens=2000)
    engine.submit(Request(tuple(b"def add(a, b):"), 1900, temperature=1.0, seed=1))
    for _ in range(4):
        engine.step()
    more, without = [], []
    with still():
        for turn in range(turns):
            spent = {wrapper: 0.0, bare: 0.0}
            for wanted in (wrapper, bare, bare, wrapper) if turn % 2 else (bare, wrapper, wrapper, bare):
                monkeypatch.setattr(rounds, "ranged", wanted)
                start = time.thread_time()
                engine.step()
                spent[wanted] += time.thread_time() - start
            more.append((spent[wrapper] - spent[bare]) / 2)
            without.append(spent[bare] / 2)
    assert len(engine.seats) == 1, "the request ended"
    round_s = statistics.fmean(middle(without))
    # of a mean over the middle half, from the spread of what lies in it
    error = 1.2 * (middle(more)[-1] - middle(more)[0]) / turns**0.5
    return statistics.fmean(middle(more)) / round_s, error / round_s, 1e3 * round_s


def test_ranges_cost_less_than_a_hundredth_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    share, error, ms = share_of_a_round(ranged, monkeypatch)
    print(f"\nranges: {100 * share:+.2f} +- {100 * error:.2f} % of a round of {ms:.2f} ms")
    assert share - 2 * error < 0.01


def test_a_planted_cost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # more turns where the machine is too busy to tell
    for turns in (30, 60, 90):
        share, error, ms = share_of_a_round(late, monkeypatch, turns)
        print(f"\nplanted: {100 * share:+.2f} +- {100 * error:.2f} % of a round of {ms:.2f} ms")
        if share - 2 * error > 0.01:
            break
    assert share - 2 * error > 0.01


def test_a_round_asks_eight_times_and_each_takes_less_than_a_microsecond() -> None:
    def asks() -> None:
        for name in (ROUND, *STAGES):
            ranged(name, bare)

    best = min(timeit.repeat(asks, number=1000, repeat=9)) / 1000
    print(f"\neight ranges: {1e6 * best:.2f} us")
    assert best < 8e-6
