"""Requests, engines and page accounting shared by the engine tests."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Completion, Request
from dmtp_kernels.testing.models import tiny_checkpoint

CHECKPOINT = tiny_checkpoint(7)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 19, (length,), generator=generator).tolist())


def engine_of(method: Any = "dmtp", **options: Any) -> Engine:
    settings = {"max_batch": 4, "max_tokens": 96, "page_size": 8, "prefill_chunk": 16} | options
    return Engine(CHECKPOINT, method, **settings)


@torch.no_grad()
def run(requests: list[Request], method: Any = "dmtp", **options: Any) -> list[Completion]:
    return engine_of(method, **options).run(requests)


def caches(engine: Engine) -> list[Any]:
    stack = engine.stack
    return [c for c in (stack.target_cache, stack.drafter_cache, stack.mtp_cache) if c is not None]


def assert_accounted(engine: Engine) -> None:
    """Free + used = total in every cache, no page in two tables, used pages belong to live requests."""
    for cache in caches(engine):
        pool = cache.pool
        assert pool.free + pool.used == pool.num_pages
        owned = [page for request in engine.live for page in pool.owned_by(request)]
        assert len(owned) == len(set(owned)) == pool.used


REQUESTS = [
    Request(prompt(n, n), 14 + n % 5, temperature=t, seed=100 + n)
    for n, t in ((3, 0.0), (30, 1.0), (9, 0.6), (17, 0.0))
]
