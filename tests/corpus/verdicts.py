"""Sampling and the acceptance rules: ties, values that are no numbers, denormals, seeds and ids at the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.corpus.entry import I32, I64, INF, NAN, Draws, Entry, edges, extreme, gaps, off

_Make = Callable[[Draws], tuple[Any, ...]]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TEMPERATURES = (0.0, 1.0, 0.5, 2.0, -0.0, 1.0, 2.0**-99, 2.0**-149, 2.0**127, 1.0, INF, NAN, -1.0, 1.0)


def _logits(draw: Draws, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of one kind each: plain, ties, nothing finite, one choice, zeros of both signs, denormals, the largest."""
    x = draw.reals(rows, vocab, dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    kinds: list[Any] = [
        x[0],
        draw.pick(vocab, of=(3.0, 3.0, 1.0), dtype=dtype),  # many ties at the top
        NAN,
        -INF,
        INF,
        draw.pick(vocab, of=edges(dtype), dtype=dtype),
        draw.pick(vocab, of=(0.0, -0.0), dtype=dtype),
        draw.pick(vocab, of=(tiny, -tiny, 0.0, 2 * tiny), dtype=dtype),
        draw.pick(vocab, of=(torch.finfo(dtype).max, -torch.finfo(dtype).max), dtype=dtype),
        draw.pick(vocab, of=(NAN, -INF, 1.0, 1.0), dtype=dtype),
    ]
    for i in range(rows):
        if i % 3 != 2 and i // 3 * 2 + i % 3 < len(kinds):
            x[i] = kinds[i // 3 * 2 + i % 3]
    lone = draw.whole(1, low=0, high=vocab)
    x[-1], x[-1, lone] = -INF, 0.0  # one entry to choose from, at any place
    return x


def _sample(
    rows: int, vocab: int, dtype: torch.dtype, index: torch.dtype, *, filters: bool = False, padding: int = 0,
    stream: int = 0,
) -> _Make:  # fmt: skip
    def make(draw: Draws) -> tuple[Any, ...]:
        logits = torch.full((rows, vocab + padding), NAN, dtype=dtype)
        if rows:
            logits[:, :vocab] = _logits(draw, rows, vocab, dtype)
        temperature = off(draw.pick(rows, of=TEMPERATURES, dtype=F32))
        seed, position = (off(draw.pick(rows, of=(*extreme(index), 5, 6, 7), dtype=index)) for _ in range(2))
        top_k = draw.pick(rows, of=(0, 1, 2, vocab - 1, vocab, 3, *extreme(index)), dtype=index) if filters else None
        top_p = draw.pick(rows, of=(0.5, 1.0, 0.0, 0.25, NAN, 2.0, -1.0, 2.0**-149, 0.875, INF), dtype=F32)
        tail = (top_k, top_p if filters else None, vocab if padding else None, stream)
        return (gaps(logits), temperature, seed, position, *tail)

    return make


def _prefix(rows: int, dtype: torch.dtype, other: torch.dtype, *, stops: int, shared: bool, ragged: bool) -> _Make:
    def make(draw: Draws) -> tuple[Any, ...]:
        batch = 48
        few = (*(1,) * 40, 2, 2**31 - 2)
        candidates = gaps(draw.pick(batch, rows, of=(*few, *extreme(dtype)), dtype=dtype))
        target = draw.pick(batch, rows, of=(*few, *extreme(other)), dtype=other)
        agree = draw.pick(batch, of=(*range(rows + 1), rows, rows))  # of the first rows
        for b in range(batch):
            n = min(rows - 1, int(agree[b]))
            target[b, :n] = candidates[b, 1 : n + 1].clamp(-(2**31), 2**31 - 1).to(other)
        shape = (stops,) if shared else (batch, stops)
        stop_ids = gaps(draw.pick(*shape, of=(2, 2**31 - 1, -1, *extreme(dtype)), dtype=dtype))
        budget = off(draw.pick(batch, of=(*range(-1, rows + 2), *(rows + 1,) * 9, *extreme(dtype)), dtype=dtype))
        count = (
            draw.pick(batch, of=(*range(-1, rows + 1), *(rows,) * 9, *extreme(dtype)), dtype=dtype) if ragged else None
        )
        return candidates, gaps(target), stop_ids, budget, count

    return make


def _draft(draw: Draws, kinds: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of probabilities that are sums of eighths; of every `kinds` rows one is no distribution, one is one-hot."""
    q = draw.reals(*shape, dtype=torch.float64, spread=8).abs()
    q = q / q.sum(dim=-1, keepdim=True).clamp(min=1 / 8)
    rows = q.view(-1, shape[-1])
    wrong = (NAN, INF, -0.5, 0.0)
    for i in range(kinds - 1, len(rows), kinds):
        rows[i, int(draw.whole(1, low=0, high=shape[-1]))] = wrong[(i // kinds) % 3]
        if i // kinds % 4 == 3:
            rows[i] = 0.0
    for i in range(kinds - 2, len(rows), kinds):
        rows[i], rows[i, i % shape[-1]] = 0.0, 1.0
    # rounded to what every type holds: sums are off by it, as an engine's are
    return (
        (q.to(torch.float32) * 256).round().div(256).to(dtype) if dtype != F32 else (q * 4096).round().div(4096).to(F32)
    )


def _sampled(
    batch: int, rows: int, vocab: int, dtype: torch.dtype, index: torch.dtype, *, dense: bool = True, listed: int = 0,
    ragged: bool = False, filters: bool = False, wild: bool = True,
) -> _Make:  # fmt: skip
    def make(draw: Draws) -> tuple[Any, ...]:
        logits = draw.reals(batch, rows, vocab, dtype=dtype, odd=(-INF, 3.0, 3.0))
        if wild and batch:
            logits = _logits(draw, batch * rows, vocab, dtype)[torch.tensor(draw.order(batch * rows))]
            logits = logits.view(batch, rows, vocab)
        sharp = draw.whole(batch, rows, low=0, high=vocab)
        candidates = draw.whole(batch, rows, low=0, high=vocab, dtype=index)
        for b in range(batch):
            for r in range(rows - 1):
                if b % 3 == 0:  # a target that likes its candidates, so that prefixes are long
                    logits[b, r] = draw.reals(vocab, dtype=dtype, spread=8)
                    logits[b, r, int(sharp[b, r])] = 4.0
                    candidates[b, r + 1] = sharp[b, r]
        if wild:
            strange = draw.whole(batch, rows, low=0, high=9) == 0
            strange[:, 0] = False
            candidates = torch.where(
                strange, draw.pick(batch, rows, of=(vocab, *extreme(index)), dtype=index), candidates
            )
        temperature = draw.pick(batch, of=(1.0, 0.0, 1.0, 0.5, 2.0, *TEMPERATURES), dtype=F32)
        seed, position = (draw.pick(batch, of=(*extreme(index), 5, 6), dtype=index) for _ in range(2))
        stop_ids = draw.pick(batch, 2, of=(-1, *range(0, vocab, 2), *extreme(index)), dtype=index)
        budget = draw.pick(batch, of=(rows, rows + 1, 2, 1, rows + 2, rows, 0, *extreme(index)), dtype=index)
        count = (
            draw.pick(batch, of=(rows - 1, rows - 1, *range(rows), *extreme(index)), dtype=index) if ragged else None
        )
        top_k = draw.pick(batch, of=(0, 2, 5, vocab, 1, *extreme(index)), dtype=index) if filters else None
        top_p = draw.pick(batch, of=(0.5, 1.0, 0.75, NAN, 0.0, 2.0), dtype=F32) if filters else None
        ids = q = None
        if listed:
            ids = gaps(draw.pick(batch, rows - 1, listed, of=(*range(vocab), -1, -1, -(2**31)), dtype=index))
            q = gaps(_draft(draw, 7, batch, rows - 1, listed, dtype=dtype))
            if batch and wild:
                ids[0, 0, 0] = vocab  # no id of the vocabulary
                ids[-1, 0] = ids[-1, 0, :1].clamp(min=0)  # one id listed again and again
        elif dense:
            q = gaps(_draft(draw, 7 if wild else 10**6, batch, rows - 1, vocab, dtype=dtype))
        head = (gaps(candidates), gaps(logits), temperature, off(seed), position, gaps(stop_ids), budget)
        return (*head, q, count, top_k, top_p, ids)

    return make


_S, _P = "sample_rows", "accept_prefix"


def _both(name: str, why: str, make: _Make) -> tuple[Entry, Entry]:
    return Entry("accept_rejection", name, why, make), Entry("accept_block", name, why, make)


ENTRIES = (
    Entry(_S, "kinds", "every kind of row at every temperature", _sample(42, 61, F32, I64)),
    Entry(_S, "half", "fp16, int32, a padded vocabulary full of NaN", _sample(30, 33, F16, I32, padding=3)),
    Entry(
        _S,
        "filters",
        "top-k and top-p at their edges, bf16, the last stream",
        _sample(42, 70, BF16, I64, filters=True, stream=2**32 - 1),
    ),
    Entry(
        _S,
        "parts",
        "more entries than a program holds, filters that meet ties",
        _sample(4, 2050, F32, I32, filters=True),
    ),
    Entry(_S, "single", "one entry to choose from", _sample(14, 1, F32, I64, filters=True)),
    Entry(_S, "one", "one row", _sample(1, 61, F32, I64)),
    Entry(_S, "none", "no row", _sample(0, 61, F32, I64)),
    Entry(
        _P,
        "edges",
        "ids, stops, budgets and counts at the edges of int64",
        _prefix(8, I64, I64, stops=3, shared=False, ragged=True),
    ),
    Entry(
        _P,
        "int32",
        "int32 candidates, int64 targets, stops of all",
        _prefix(8, I32, I64, stops=2, shared=True, ragged=True),
    ),
    Entry(_P, "no_stop", "no stop ids", _prefix(5, I64, I32, stops=0, shared=True, ragged=False)),
    Entry(_P, "anchor_only", "nothing to accept", _prefix(1, I32, I32, stops=1, shared=False, ragged=True)),
    Entry(_P, "wide", "more rows than a warp has lanes", _prefix(37, I32, I32, stops=2, shared=True, ragged=True)),
    Entry(
        _P, "one", "one request", lambda draw: _first(1, _prefix(8, I64, I64, stops=3, shared=False, ragged=True)(draw))
    ),
    Entry(
        _P, "none", "no request", lambda draw: _first(0, _prefix(8, I64, I64, stops=3, shared=False, ragged=True)(draw))
    ),
    *_both("plain", "distributions alone, greedy and sampled requests", _sampled(12, 5, 33, F32, I64, wild=False)),
    *_both(
        "kinds", "rows and drafts that are no distributions, ids outside", _sampled(30, 4, 17, F32, I64, ragged=True)
    ),
    *_both("half", "bf16, int32, filters", _sampled(12, 4, 19, BF16, I32, ragged=True, filters=True)),
    *_both(
        "listed",
        "shortlists with padding, repeated ids and ids outside",
        _sampled(18, 4, 29, F32, I32, listed=6, ragged=True),
    ),
    *_both("parts", "more entries than a program holds", _sampled(2, 3, 2050, F16, I64, filters=True, wild=False)),
    *_both("anchor_only", "one draw each", _sampled(6, 1, 17, F32, I64)),
    *_both("one", "one request", _sampled(1, 4, 17, F32, I64)),
    *_both("none", "no request", _sampled(0, 4, 17, F32, I64)),
    Entry(
        "accept_rejection",
        "one_hot",
        "a draft that is certain of its candidates",
        _sampled(18, 4, 17, F32, I64, dense=False, ragged=True),
    ),
)


def _first(batch: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t if t is None else t[:batch] for t in inputs)
