"""Calls of commit_round whose caches agree in nothing, and what commit_kv makes of each cache alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.commit_kv import commit_kv
from tests.ops.commit_kv_oracle import same


@dataclass
class Cache:
    """One cache and the round's rows for it; `slots` in flat numbers."""

    rows: tuple[list[torch.Tensor], list[torch.Tensor]]  # K and V, a layer each
    caches: tuple[list[torch.Tensor], list[torch.Tensor]]
    dst: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)
    """What `commit_kv` is given for this cache alone: first_slot, scales, and for the last one its slots."""


def make_cache(
    batch: int,
    *,
    width: int = 8,
    layers: int = 1,
    heads: int = 2,
    dims: tuple[int, int] = (8, 8),
    slots: int = 0,
    page_size: int = 0,
    rows_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    index: torch.dtype = torch.int64,
    tail: bool = False,
    seed: int = 0,
) -> Cache:
    """`slots` > 0: so few that requests and rows meet in them, else each is used once. `tail`: pending and scratch."""
    g = torch.Generator().manual_seed(seed)
    per_request = 2 * width + 2
    count = slots or batch * per_request
    pages = -(-count // page_size) if page_size else count
    count = pages * max(page_size, 1)
    shape = (pages, page_size) if page_size else (pages,)
    kind = dtype or rows_dtype
    rows = tuple(
        [torch.randn(batch, width, heads, dim, generator=g).to(rows_dtype) for _ in range(layers)] for dim in dims
    )
    caches = tuple([torch.randn(*shape, heads, dim, generator=g).to(kind) for _ in range(layers)] for dim in dims)
    if slots:
        used = torch.randint(-1, count + 1, (batch, per_request), generator=g)
    else:
        used = torch.randperm(count, generator=g)[: batch * per_request].view(batch, per_request)
    used = used.to(index)
    options: dict[str, Any] = {}
    if tail:
        options = {
            "pending_slot": used[:, -1],
            "promote_dst": used[:, -2],
            "scratch_dst": used[:, width : 2 * width],
            "hidden": torch.randn(batch, width, 40, generator=g),
            "next_hidden": torch.randn(batch, 40, generator=g),
            "lengths": torch.arange(batch),
        }
    return Cache(rows, caches, used[:, :width], options)  # type: ignore[arg-type]


TAIL = ("pending_slot", "promote_dst", "scratch_dst", "hidden", "next_hidden", "lengths")


def call(caches: list[Cache], valid: torch.Tensor, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of `commit_round`."""
    lists = [[tensor for c in caches for tensor in (*c.rows, *c.caches)[kind]] for kind in range(4)]
    named = {"layers": [len(c.rows[0]) for c in caches], "first_slot": [c.options.get("first_slot", 0) for c in caches]}
    for name in ("k_scale", "v_scale"):
        if any(name in c.options for c in caches):
            named[name] = [scale for c in caches for scale in _per_layer(c, c.options.get(name))]
    named |= {name: value for name, value in caches[-1].options.items() if name in TAIL}
    return [*lists, valid, [c.dst for c in caches]], named | options


def _per_layer(cache: Cache, scale: Any) -> list[Any]:
    return scale if isinstance(scale, list) else [scale] * len(cache.rows[0])


def clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: clone(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(clone(v) for v in value)
    return value


def one_by_one(caches: list[Cache], valid: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    """`commit_kv`'s definition on every cache, in place; the error bits of all."""
    error = torch.zeros(len(valid), dtype=torch.int32)
    with use_backend("reference", "commit_kv"):
        for c in caches:
            error |= commit_kv(*c.rows, *c.caches, valid, c.dst, live=live, **c.options)
    return error


def check(run: Any, caches: list[Cache], valid: torch.Tensor, **options: Any) -> torch.Tensor:
    """`run` leaves in every cache what one call a cache leaves; returns the error bits."""
    alone = [Cache(c.rows, clone(c.caches), c.dst, clone(c.options)) for c in caches]
    want = one_by_one(alone, valid, **options)
    positional, named = call(caches, valid, **options)
    error: torch.Tensor = run(*positional, **named)
    assert torch.equal(error, want)
    for got, wanted in zip(caches, alone, strict=True):
        for kind in range(2):
            for g, w in zip(got.caches[kind], wanted.caches[kind], strict=True):
                assert same(g, w)
        for name in ("next_hidden", "lengths"):
            if name in got.options:
                assert torch.equal(got.options[name], wanted.options[name])
    return error
