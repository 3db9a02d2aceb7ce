"""Commits of rows whose bits say where they came from: shared slots, sinks, stale tails, counts at the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.corpus.entry import I32, I64, Draws, Entry, column, edges, extreme, gaps

_Make = Callable[[Draws], tuple[Any, ...]]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _rows(draw: Draws, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return draw.reals(*shape, dtype=dtype, odd=edges(dtype))


def _stored(draw: Draws, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What a cache holds already, gaps between its rows: numbers, or any code of one byte."""
    if dtype.itemsize == 1:
        return gaps(draw.whole(*shape, low=0, high=256, dtype=torch.uint8)).view(dtype)
    return gaps(_rows(draw, *shape, dtype=dtype))


def _cache(
    batch: int, rows: int, heads: int, dims: tuple[int, int], *, layers: int = 1, dtype: torch.dtype = F32,
    cache: torch.dtype | None = None, index: torch.dtype = I64, page_size: int = 0, rounds: bool = True,
    crowded: bool = False, scaled: bool = False, turns: bool = False, norm: bool = False, first_slot: int = 1,
) -> _Make:  # fmt: skip
    """Without `crowded` every slot that is inside belongs to one write."""
    kept = dtype if cache is None else cache
    per_request = 2 * rows + 2
    num_slots = 4 * ((batch * per_request + 3) // 4) + 4

    def make(draw: Draws) -> tuple[Any, ...]:
        order = torch.tensor(draw.order(num_slots))[: batch * per_request].view(batch, per_request)
        wrong = draw.pick(batch, per_request, of=(num_slots, *extreme(index)), dtype=index)
        slots = torch.where(draw.whole(batch, per_request, low=0, high=6) == 0, wrong, order.to(index))
        if crowded:
            slots = draw.pick(batch, per_request, of=(*range(9), num_slots - 1, num_slots, -1, 0), dtype=index)
        keys, values = (
            [gaps(_rows(draw, batch, rows, heads, dim, dtype=dtype)) for _ in range(layers)] for dim in dims
        )
        if norm:  # rows of one size have an exact norm
            keys = [gaps(draw.pick(batch, rows, heads, dims[0], of=(2.0, -2.0), dtype=dtype)) for _ in keys]
        shape = (num_slots // page_size, page_size) if page_size else (num_slots,)
        held = [[_stored(draw, *shape, heads, dim, dtype=kept) for _ in range(layers)] for dim in dims]
        count = draw.pick(batch, of=(*range(-1, rows + 2), *range(rows + 1), *extreme(index)), dtype=index)
        table = positions = None
        if turns:
            quarter = draw.whole(7, dims[0] // 4, low=0, high=4)
            turn = torch.tensor([1.0, 0, -1, 0, 1])
            table = torch.cat((turn[quarter], turn[quarter + 1]), dim=1)
            positions = gaps(draw.pick(batch, rows, of=(*range(7), *extreme(index)), dtype=index))
        scales: list[Any] = [None, None]
        if scaled:
            scales = [[draw.pick(heads, of=(0.5, 2.0, 3.0), dtype=F32)], [torch.tensor(0.25) for _ in range(layers)]]
        norms = [draw.pick(dims[0], of=(1.0, 0.5, -2.0), dtype=dtype)] if norm else None
        tail = (*scales, norms, 0.0, 1.0 if norm else 0.0, table, positions)
        head = (keys, values, *held, column(count), gaps(slots[:, :rows].contiguous()))
        if not rounds:
            return (*head, None, None, None, None, None, None, None, 0, *tail)
        hidden = gaps(_rows(draw, batch, rows, 11, dtype=dtype))
        before = gaps(_rows(draw, batch, 11, dtype=dtype))
        lengths = column(draw.pick(batch, of=(0, 7, 2**31 - 1 - rows), dtype=index))
        live = draw.pick(batch, of=(True, True, False), dtype=torch.bool)
        spots = column(slots[:, -1]), column(slots[:, -2]), gaps(slots[:, rows : 2 * rows].contiguous())
        return (*head, *spots, hidden, before, lengths, live, first_slot, *tail)

    return make


def _view_of_scratch(draw: Draws) -> tuple[Any, ...]:
    """Rows that are a view of the request's own scratch in the same cache: reads come before writes."""
    batch, rows, heads, dim = 6, 4, 2, 16
    cache = [draw.reals(batch * 9 + 3, heads, dim, odd=edges(F32)) for _ in range(2)]
    views = [c[: batch * rows].view(batch, rows, heads, dim) for c in cache]
    own = torch.arange(batch * rows).view(batch, rows)
    others = batch * rows + torch.tensor(draw.order(batch * (rows + 2))).view(batch, rows + 2)
    count = torch.tensor([0, 1, 2, 3, 4, 9])
    head = ([views[0]], [views[1]], [cache[0]], [cache[1]], count, others[:, :rows])
    moved = (others[:, rows].clone(), others[:, rows + 1].clone(), own.flip(1))
    return (*head, *moved, None, None, None, None, 0, None, None, None, 0.0, 0.0, None, None)


def _together(*makes: _Make) -> _Make:
    """One call for several caches; pending slot, counts and hidden are the last one's."""

    def make(draw: Draws) -> tuple[Any, ...]:
        made = [m(draw) for m in makes]
        lists = [[tensor for m in made for tensor in m[i]] for i in range(4)]
        layers = [len(m[0]) for m in made]
        scales = []
        for i in (14, 15):
            each = [[*(m[i] or [torch.empty(0)])] for m in made]
            each = [e if len(e) == n else e * n for e, n in zip(each, layers, strict=True)]
            scales.append([t for e in each for t in e] if any(m[i] for m in made) else None)
        return (*lists, made[-1][4], [m[5] for m in made], layers, *made[-1][6:13], [m[13] for m in made], *scales)

    return make


_KV, _ROUND = "commit_kv", "commit_round"
_TARGET = _cache(9, 4, 1, (8, 24), layers=2, dtype=BF16, page_size=2, rounds=False)
_MTP = _cache(9, 4, 2, (16, 16))

ENTRIES = (
    Entry(_KV, "edges", "slots and counts at the edges of int64", _cache(9, 8, 2, (16, 16))),
    Entry(
        _KV,
        "crowded",
        "writes that share slots, sinks, pending rows with two owners",
        _cache(9, 8, 2, (16, 12), crowded=True),
    ),
    Entry(
        _KV,
        "paged",
        "pages, layers, an odd head size, bf16, int32",
        _cache(6, 5, 3, (10, 7), layers=3, dtype=BF16, index=I32, page_size=4),
    ),
    Entry(
        _KV,
        "narrowed",
        "fp32 rows in an fp16 cache: infinities, denormals, rounding",
        _cache(5, 4, 2, (16, 16), cache=F16),
    ),
    Entry(_KV, "widened", "fp16 rows in an fp32 cache", _cache(5, 4, 2, (9, 16), dtype=F16, cache=F32, crowded=True)),
    Entry(
        _KV,
        "e4m3",
        "saturation and NaN codes, scales of a head and of a layer",
        _cache(5, 4, 2, (16, 16), layers=2, dtype=BF16, cache=E4M3, scaled=True),
    ),
    Entry(_KV, "e5m2", "the other code", _cache(5, 4, 2, (8, 16), cache=E5M2, scaled=True, page_size=2)),
    Entry(_KV, "turned", "quarter turns, positions outside the table", _cache(5, 4, 2, (16, 8), turns=True)),
    Entry(_KV, "normed", "rows whose norm is exact", _cache(5, 4, 2, (16, 8), norm=True, dtype=BF16, crowded=True)),
    Entry(_KV, "shifted", "neither pending slot nor scratch", _cache(5, 4, 2, (16, 16), rounds=False)),
    Entry(_KV, "views", "rows that lie in the request's own scratch", _view_of_scratch),
    Entry(_KV, "one_row", "one row a request", _cache(7, 1, 1, (16, 16), crowded=True)),
    Entry(_KV, "one", "one request", _cache(1, 8, 2, (16, 16))),
    Entry(_KV, "none", "no request", _cache(0, 8, 2, (16, 16))),
    Entry(
        _ROUND,
        "round",
        "three caches that agree in nothing",
        _together(_TARGET, _cache(9, 4, 3, (12, 12), layers=2, rounds=False, index=I32), _MTP),
    ),
    Entry(
        _ROUND,
        "scaled",
        "one cache of fp8 with scales",
        _together(
            _cache(5, 4, 3, (8, 8), rounds=False),
            _cache(5, 4, 2, (16, 16), dtype=BF16, cache=E4M3, scaled=True, page_size=4, crowded=True),
        ),
    ),
    Entry(
        _ROUND,
        "one",
        "one request",
        _together(_cache(1, 3, 1, (8, 8), rounds=False, crowded=True), _cache(1, 3, 1, (8, 8))),
    ),
    Entry(
        _ROUND,
        "none",
        "no request",
        _together(_cache(0, 3, 1, (8, 8), rounds=False), _cache(0, 3, 1, (8, 8), index=I32)),
    ),
)
