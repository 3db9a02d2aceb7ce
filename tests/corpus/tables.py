"""Page tables and the bookkeeping of a round: page boundaries, stale tails, lengths and pages at the edges of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.corpus.entry import I32, I64, Draws, Entry, column, extreme, gaps, off

_Make = Callable[[Draws], tuple[Any, ...]]


def _around(page_size: int, pages: int, block_slots: int) -> list[int]:
    """Lengths one off every page boundary, of nothing, and of what just fits or does not."""
    most = page_size * pages - block_slots
    near = {n * page_size + d for n in range(pages + 1) for d in (-1, 0, 1)}
    return sorted(near | {most - 1, most, most + 1, -1, 0})


def _paged(window: int, page_size: int, block_slots: int, dtype: torch.dtype, *, skip: bool, wide: int = 0) -> _Make:
    pages = 5

    def make(draw: Draws) -> tuple[Any, ...]:
        lengths = [*_around(page_size, pages, block_slots), *extreme(dtype)]
        batch = len(lengths)
        ids = (*range(1, 9), 2**31 - 1, *extreme(dtype))
        table = gaps(draw.pick(batch, pages, of=ids, dtype=dtype))
        start = off(draw.pick(batch, of=(*range(-1, page_size * pages), *extreme(I32)), dtype=I32)) if skip else None
        return table, torch.tensor(lengths, dtype=dtype), window, page_size, block_slots, wide or None, start

    return make


def _slots(window: int, page_size: int, block_slots: int, dtype: torch.dtype, *, pool: bool) -> _Make:
    length = 5 * page_size - page_size // 2  # the last page is a part of one

    def make(draw: Draws) -> tuple[Any, ...]:
        lengths = [n for n in _around(page_size, 5, block_slots) if n <= length + 1] + list(extreme(dtype))
        batch = len(lengths)
        ids = (*range(page_size * 9), *extreme(dtype), -page_size, 1 - page_size)
        rows = batch // 2 if pool else batch
        table = gaps(draw.pick(rows, length, of=ids, dtype=dtype))
        picked = draw.pick(batch, of=(*range(rows), rows, *extreme(I64))) if pool else None
        start = None if pool else draw.pick(batch, of=(0, 1, page_size, length), dtype=I64)
        return table, torch.tensor(lengths, dtype=dtype), window, page_size, picked, block_slots, None, start

    return make


def _cut(make: _Make, batch: int, *tensors: int) -> _Make:
    """The first requests of a call alone."""

    def some(draw: Draws) -> tuple[Any, ...]:
        made = list(make(draw))
        for i in tensors:
            if made[i] is not None:
                made[i] = [t[:batch] for t in made[i]] if isinstance(made[i], list) else made[i][:batch]
        return tuple(made)

    return some


def _advance(
    sizes: tuple[int, ...], rows: int, *, grants: int = 0, block_slots: int = 0, first_page: int = 1,
    index: torch.dtype = I64,
) -> _Make:  # fmt: skip
    def make(draw: Draws) -> tuple[Any, ...]:
        batch, pages = 40, 4
        longest = pages * max(sizes, default=4)
        near = [n + d for size in (*sizes, 4) for n in range(0, longest + 1, size) for d in (-1, 0, 1) if n + d >= 0]
        length = draw.pick(batch, of=[*near, 2**31 - 1 - rows, 2**30], dtype=index)
        budget = draw.pick(batch, of=(1, 2, rows - 1, rows, rows + 1, 2**31 - 1, 0, -1, -(2**31)), dtype=index)
        dead = budget <= 0  # whatever these hold reaches no output
        length = torch.where(dead, draw.pick(batch, of=[*extreme(index)[:-1], 7], dtype=index), length)
        count = draw.pick(batch, of=(*range(-1, rows + 2), *extreme(I32)), dtype=I32)
        anchor, bonus = (draw.pick(batch, of=(*range(9), *extreme(index)), dtype=index) for _ in range(2))
        finished = draw.whole(batch, low=0, high=3, dtype=I32)
        ended = draw.pick(batch, of=(0, 0, 0, 1, 2, -1), dtype=I32)
        tables = [
            gaps(draw.pick(batch, pages - t, of=(*range(6), -1, 2**31 - 1, -(2**31)), dtype=(index, I32)[t % 2]))
            for t in range(len(sizes))
        ]
        given = None
        if grants:
            parts = (
                draw.pick(batch, grants, of=(*range(-1, len(sizes) + 1), 0, 0, *extreme(I32)), dtype=I32),
                draw.pick(batch, grants, of=(*range(-1, pages + 1), 0, 0, 2**31 - 1), dtype=I32),
                draw.pick(batch, grants, of=(*range(7), -1, 2**31 - 1, -(2**31)), dtype=I32),
            )
            given = gaps(torch.stack(parts, dim=2))
        state = [column(t) for t in (length, anchor, budget, finished, count, bonus, ended)]
        return (*state, tables, list(sizes), rows, given, block_slots, 98, first_page)

    return make


_STATE = (0, 1, 2, 3, 4, 5, 6, 7)
_PAGES, _TOKENS, _ROUND = "draft_page_table", "draft_page_table_from_slots", "advance_round"
_LOOP = _advance((4, 2, 4), 8, grants=5, block_slots=8)

ENTRIES = (
    Entry(
        _PAGES,
        "boundaries",
        "every length near a page's edge, pages at the edges of int64",
        _paged(9, 4, 3, I64, skip=True),
    ),
    Entry(_PAGES, "int32", "int32 edges, window in mid-page, stale tails", _paged(6, 8, 0, I32, skip=False)),
    Entry(_PAGES, "page_one", "pages of one token, a wider table than needed", _paged(3, 1, 2, I32, skip=True, wide=9)),
    Entry(_PAGES, "all_of_it", "a window beyond any history", _paged(2**31 - 1, 4, 3, I64, skip=False)),
    Entry(_PAGES, "no_window", "the block alone", _paged(0, 4, 8, I64, skip=True)),
    Entry(_PAGES, "one", "one request", _cut(_paged(9, 4, 3, I64, skip=True), 1, 0, 1, 6)),
    Entry(_PAGES, "none", "no request", _cut(_paged(9, 4, 3, I64, skip=True), 0, 0, 1, 6)),
    Entry(
        _TOKENS,
        "pool",
        "rows of the pool that are not there, slots at the edges of int64",
        _slots(9, 4, 3, I64, pool=True),
    ),
    Entry(_TOKENS, "int32", "slots below 0, which belong to no page", _slots(6, 8, 0, I32, pool=False)),
    Entry(_TOKENS, "page_one", "SGLang's default", _slots(5, 1, 2, I32, pool=True)),
    Entry(_TOKENS, "one", "one request", _cut(_slots(9, 4, 3, I64, pool=True), 1, 1, 4)),
    Entry(_TOKENS, "none", "no request", _cut(_slots(9, 4, 3, I64, pool=True), 0, 1, 4)),
    Entry(_ROUND, "loop", "three tables, grants of one entry twice and of none, dead requests with any content", _LOOP),
    Entry(_ROUND, "int32", "int32 state, no grants", _advance((4,), 5, index=I32, first_page=0)),
    Entry(_ROUND, "page_one", "token-granular pages", _advance((1, 3), 3, grants=3, index=I32)),
    Entry(_ROUND, "no_table", "positions alone", _advance((), 1, block_slots=3)),
    Entry(_ROUND, "one", "one request", _cut(_LOOP, 1, *_STATE, 10)),
    Entry(_ROUND, "none", "no request", _cut(_LOOP, 0, *_STATE, 10)),
)
