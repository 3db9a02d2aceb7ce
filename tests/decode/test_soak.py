"""A short soak in every run of the tests, and bugs planted in the books that it must find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.caches import PagePool
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.seating import Seating
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.testing.soak import Soak
from tests.decode.engine_cases import CHECKPOINT


@pytest.mark.parametrize(("method", "count"), [("dmtp", 120), ("context_fusion", 40), ("mtp3", 40)])
def test_rows_098_099_102_110_111_soak(method: str, count: int) -> None:
    """20,000 rounds were run once (README.md of the loop has the figures); here a few hundred."""
    figures = Soak(CHECKPOINT, method, seed=1, page_size=3 if method == "mtp3" else 4).run(count)
    assert figures.failures == []
    assert figures.rounds >= count
    assert min(figures.completed, figures.accepted, figures.sat_out) > 0
    if count == 120:
        assert min(figures.aborted, figures.preempted, figures.ran_short, figures.broken) > 0


def _twice_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = PagePool.allocate

    def allocating(self: PagePool, count: int, owner: int) -> list[int]:
        pages = allocate(self, count, owner)
        if pages and owner % 5 == 4:
            self._free.append(pages[0])
        return pages

    monkeypatch.setattr(PagePool, "allocate", allocating)


def _late_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Seating.__init__

    def __init__(self: Seating, *args: Any) -> None:
        init(self, *args)
        self.ahead = self.stack.rows

    monkeypatch.setattr(Seating, "__init__", __init__)


def _grants_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seating, "_send", lambda self, grants: None)


def _late_result_to_a_new_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    land = Engine._land

    def landing(self: Engine, flight: Any) -> Any:
        # whoever sits in the row now gets what was decided for the one before
        pairs = zip(flight.seats, self.seats + flight.seats, strict=False)
        flight.seats = [then if then in self.seats else now for then, now in pairs]
        return land(self, flight)

    monkeypatch.setattr(Engine, "_land", landing)


def _leaking_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Seating._release

    def releasing(self: Seating, seat: Any) -> None:
        if seat.pages.get("target"):
            seat.pages["target"].pop()
        release(self, seat)

    monkeypatch.setattr(Seating, "_release", releasing)


def _stale_index_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def round_view(self: Seating) -> BatchState:
        return self._views[len(self.seats)]

    monkeypatch.setattr(Seating, "round_view", round_view)


def _null_page_written(monkeypatch: pytest.MonkeyPatch) -> None:
    commit: Any = rounds.commit_round

    def committing(*args: Any, **kwargs: Any) -> Any:
        *rows_and_caches, valid, dst = args
        every = torch.full_like(valid, dst[0].shape[1])
        return commit(*rows_and_caches, every, [slots.clamp(min=0) for slots in dst], **kwargs)

    monkeypatch.setattr(rounds, "commit_round", committing)


def _swapped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    commit: Any = rounds.commit_round

    def committing(*args: Any, **kwargs: Any) -> Any:
        *others, (target, *dst) = args
        return commit(*others, [target.roll(1, 1), *dst], **kwargs)

    monkeypatch.setattr(rounds, "commit_round", committing)


PLANTED = {
    "a page with two owners": (_twice_owned, "pages"),
    "pages granted a round late": (_late_grants, "an error that nobody planted"),
    "grants that do not arrive": (_grants_lost, "request"),
    "a late result given to the row's new owner": (_late_result_to_a_new_owner, "request"),
    "a page kept when its request leaves": (_leaking_leave, "in use"),
    "indices of the row that was there before": (_stale_index_after_a_move, "request"),
    "padded rows write slot 0": (_null_page_written, "page 0 was written"),
    "target rows in each other's slots": (_swapped_rows, "request"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, finding = PLANTED[name]
    plant(monkeypatch)
    try:
        failures = Soak(CHECKPOINT, seed=3).run(150).failures
    except ValueError as error:  # the pool itself refuses a page of another owner
        failures = [str(error)]
    assert any(finding in failure for failure in failures), failures[:2]
