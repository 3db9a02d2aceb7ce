"""Who sits in which row, and who owns which page: rows without gaps, pages granted ahead of need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.round import refresh
from dmtp_kernels.decode.stack import MAX_ROWS, Stack
from dmtp_kernels.decode.state import BatchState


@dataclass(eq=False)
class Seat:
    """A request's stay in a row, with the pages it holds; a request that was preempted gets a new one.

    `known` is the length the host knows: rows in the caches after the last round it has read.
    """

    request_id: int
    order: int
    pages: dict[str, list[int]] = field(default_factory=dict)  # by owner, in the order of the table's columns
    tail: list[int] = field(default_factory=list)
    known: int = 0


class Seating:
    """The live rows 0..B-1 of a state and the pages behind them.

    A round's rows need their pages when they are indexed, at the end of the round before. The host knows lengths one
    round late and there is a round in flight, so `ahead` covers three rounds: the one in flight, the one launched now
    and the one that it indexes.
    """

    def __init__(self, stack: Stack, state: BatchState, max_batch: int) -> None:
        self.stack, self.state = stack, state
        self.seats: list[Seat] = []
        self.ahead = 3 * stack.rows
        self._views = {n: state.rows(0, n) for n in range(1, max_batch + 1)}
        self._stale = False
        self._admitted = 0
        # a copy to the device may be under way while the next one is prepared
        pinned = state.grants.is_cuda
        self._granted = [torch.empty_like(state.grants, device="cpu", pin_memory=pinned) for _ in range(2)]

    def needs(self, rows: int) -> dict[str, int]:
        """Pages of each cache that `rows` rows of one request take, private tails included."""
        stack = self.stack
        tail = {"mtp": stack.tail_pages} if stack.mtp_cache is not None else {}
        return {o: pages_for(rows, stack.cache(o).page_size) + tail.get(o, 0) for o in stack.owners}

    def has_room(self, rows: int) -> bool:
        """Whether a request of `rows` rows gets its pages and leaves one of each cache for everybody who is seated."""
        spare = len(self.seats)
        return all(n + spare <= self.stack.cache(o).pool.free for o, n in self.needs(rows).items())

    def sit(self, request_id: int, rows: int) -> Seat:
        """Give a request the next row and pages for `rows` rows, and fill its tables.

        Raises:
            OutOfPages: a pool has too few; nothing was taken.
        """
        stack, seat = self.stack, Seat(request_id, self._admitted)
        try:
            for owner in stack.owners:
                cache = stack.cache(owner)
                if owner == "mtp":
                    seat.tail = cache.pool.allocate(stack.tail_pages, request_id)
                seat.pages[owner] = cache.pool.allocate(pages_for(rows, cache.page_size), request_id)
            self._admitted += 1
            self.seats.append(seat)
            self._fill_tables(seat)
        except BaseException:
            if seat in self.seats:
                self.leave(seat)
            else:
                self._release(seat)
            raise
        return seat

    def _fill_tables(self, seat: Seat) -> None:
        view = self.row(seat)
        for owner, pages in seat.pages.items():
            table = getattr(view, f"{owner}_table")
            table.fill_(0)
            table[0, : len(pages)] = torch.tensor(pages, dtype=table.dtype)
        if seat.tail:
            size = self.stack.cache("mtp").page_size
            slots = [page * size + i for page in seat.tail for i in range(size)]
            view.tail_slots.copy_(torch.tensor([slots[: 1 + MAX_ROWS]]))

    def row(self, seat: Seat) -> BatchState:
        """The view on a seat's row."""
        row = self.seats.index(seat)
        return self.state.rows(row, row + 1)

    def leave(self, seat: Seat) -> None:
        """Free a seat's row and pages; the last row moves into the gap."""
        row, last = self.seats.index(seat), len(self.seats) - 1
        if row != last:
            self.state.move(last, row)
            self.seats[row] = self.seats[last]
        self.seats.pop()
        self.state.clear(last, self.stack.method.num_candidates)
        self._stale = True
        self._release(seat)

    def grow(self, limit: Callable[[Seat], int]) -> list[Seat]:
        """Grant every seat the pages of its next rounds, at most those of `limit(seat)` rows, oldest seat first.

        Where a pool runs short the newest seat leaves, until it suffices. Returns those who left.
        """
        left: list[Seat] = []
        grants: dict[Seat, list[tuple[int, int, int]]] = {}
        for seat in sorted(self.seats, key=lambda s: s.order):
            rows = min(seat.known + self.ahead, limit(seat))
            if rows <= self._covered(seat):
                continue
            while seat in self.seats and not self._suffices(seat, rows):
                newest = max(self.seats, key=lambda s: s.order)
                self.leave(newest)
                left.append(newest)
            if seat in self.seats and (granted := self._grant(seat, rows)):
                grants[seat] = granted
        self._send({seat: granted for seat, granted in grants.items() if seat in self.seats})
        return left

    def round_view(self) -> BatchState:
        """The live rows, ready for a round."""
        if self._stale:
            refresh(self.stack, self.state)  # rows behind the live ones too: a padded round runs them
            self._stale = False
        return self._views[len(self.seats)]

    def _covered(self, seat: Seat) -> int:
        """Rows that a seat has pages for in every cache; 0 once it left."""
        return min((len(p) * self.stack.cache(o).page_size for o, p in seat.pages.items()), default=0)

    def _missing(self, seat: Seat, rows: int) -> dict[str, int]:
        return {
            owner: max(0, pages_for(rows, self.stack.cache(owner).page_size) - len(pages))
            for owner, pages in seat.pages.items()
        }

    def _suffices(self, seat: Seat, rows: int) -> bool:
        return all(n <= self.stack.cache(o).pool.free for o, n in self._missing(seat, rows).items())

    def _grant(self, seat: Seat, rows: int) -> list[tuple[int, int, int]]:
        """Allocate what is missing; (table, column, page) of each."""
        granted = []
        for table, (owner, count) in enumerate(self._missing(seat, rows).items()):
            pages = seat.pages[owner]
            column = len(pages)
            pages += self.stack.cache(owner).pool.allocate(count, seat.request_id)
            granted += [(table, column + i, page) for i, page in enumerate(pages[column:])]
        return granted

    def _send(self, grants: dict[Seat, list[tuple[int, int, int]]]) -> None:
        if not grants:
            return
        host = self._granted[0]
        self._granted.reverse()
        host.fill_(-1)
        for seat, granted in grants.items():
            host[self.seats.index(seat), : len(granted)] = torch.tensor(granted, dtype=host.dtype)
        self.state.grants.copy_(host, non_blocking=True)

    def _release(self, seat: Seat) -> None:
        for owner, pages in seat.pages.items():
            self.stack.cache(owner).pool.release(pages, seat.request_id)
        if seat.tail:
            self.stack.cache("mtp").pool.release(seat.tail, seat.request_id)
        seat.pages, seat.tail = {}, []
