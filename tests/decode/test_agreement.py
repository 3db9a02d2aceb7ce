"""Teacher-forced agreement looks at every position with the state that a fresh prefill there would give."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.decode.agreement import teacher_forced_agreement
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Completion, Request
from dmtp_kernels.decode.round import propose
from dmtp_kernels.models.checkpoint import load_checkpoint

CHECKPOINT = load_checkpoint(drafters=["dmtp", "dflash"])


@torch.no_grad()
def proposed_after(method: str, prompt: tuple[int, ...]) -> list[int]:
    engine = Engine(CHECKPOINT, method, max_batch=1, max_tokens=96)
    engine.submit(Request(prompt, 9))
    engine.admit()
    engine.seating.grow(lambda seat: 96)
    return propose(engine.stack, engine.seating.round_view()).candidates[0, 1:].tolist()


@pytest.mark.parametrize("method", ["dmtp", "dflash"])
def test_every_position_counts_as_a_prefill_there_would(method: str) -> None:
    width = METHODS[method].num_candidates
    requests = [
        Request(tuple(b"def add(a, b):"), 44),
        Request(tuple(b"import "), 30),
    ]  # longer than the pages of an admission
    plain = Engine(CHECKPOINT, "autoregressive", max_batch=2, max_tokens=96)
    texts: list[Completion] = plain.run(requests)
    hits, count = [0] * width, 0
    for text in texts:
        tokens = list(text.tokens)
        for at in range(len(tokens) - width):
            candidates = proposed_after(method, (*text.request.prompt, *tokens[:at]))
            for k in range(width):
                hits[k] += candidates[k] == tokens[at + 1 + k]
            count += 1
    assert count > 50
    found = teacher_forced_agreement(CHECKPOINT, METHODS[method], texts)
    assert found == pytest.approx([hit / count for hit in hits])
    assert sum(hits) > 0
