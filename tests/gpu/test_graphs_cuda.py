"""Rounds captured into CUDA graphs: replay equals eager, whatever joined, left or ran before."""

from __future__ import annotations

import random

import pytest
import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.graphs import GROUPS
from dmtp_kernels.decode.request import Request
from dmtp_kernels.testing.models import tiny_checkpoint

pytestmark = pytest.mark.gpu
MAX_BATCH = 32


def _engine(graphs: str | None, method: str) -> Engine:
    checkpoint = tiny_checkpoint(7)
    for module in checkpoint.modules().values():
        module.to("cuda")
    return Engine(checkpoint, method, max_batch=MAX_BATCH, max_tokens=96, page_size=8, prefill_chunk=16, graphs=graphs)


def _requests(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            tuple(rng.randrange(19) for _ in range(rng.randint(1, 30))),
            rng.randint(1, 40),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            seed=i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("method", ["dmtp", "dflash", "mtp4"])
@pytest.mark.parametrize("mode", ["exact", "padded"])
@torch.no_grad()
def test_replay_equals_eager(method: str, mode: str) -> None:
    """Rows 141, 142, 145, 146, 158: joins, leaves and aborts at random, the same moments for both."""
    outputs = []
    for graphs in (None, mode):
        engine = _engine(graphs, method)
        rng = random.Random(5)
        for request in _requests(120, 3):
            engine.submit(request)
        captures = None
        while engine.busy:
            engine.step()
            if engine.live and rng.random() < 0.05:
                engine.abort(rng.choice(engine.live))
            if engine.graphs is not None:
                assert captures in (None, engine.graphs.captures)
                captures = engine.graphs.captures
                assert captures == len(GROUPS) * len(engine.graphs.sizes)
        outputs.append([tuple(c.tokens) for c in engine.completions.values()])
    assert outputs[0] == outputs[1]


@torch.no_grad()
def test_results_copied_after_a_round_are_whole_when_read_late() -> None:
    """Row 142 (vllm#53520): graphs of one pool reuse memory. A request leaves before every round, so that the graphs of
    another size run between a round and the host's reading of it."""
    read: list[list[list[list[int]]]] = []
    for graphs in (None, "exact"):
        engine = _engine(graphs, "dmtp")
        for i in range(24):
            engine.submit(Request((1 + i % 18, 2), 90, seed=i))
        engine.step()
        tokens = []
        while len(engine.seats) > 1:
            engine.abort(engine.live[-1])
            late = engine._flight
            engine.step()
            assert late is not None
            tokens.append(late.landing.read()[0])
        read.append(tokens)
    assert len(read[0]) > 5 and read[0] == read[1]
