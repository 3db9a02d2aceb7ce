"""Rounds that the tests of the sampled acceptance rules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmtp_kernels.ops.accept import SampledAcceptance, accept_block, accept_rejection
from tests.ops.conftest import INTERPRETED

NAN, INF = float("nan"), float("inf")
Rule = Callable[..., SampledAcceptance]
RULES = pytest.mark.parametrize("rule", [accept_rejection, accept_block])
MANY = pytest.mark.skipif(INTERPRETED, reason="needs many requests: test_accept_triton.py has some interpreted")


def call(rule: Rule, candidates: Any, logits: torch.Tensor, **overrides: Any) -> SampledAcceptance:
    candidates = torch.as_tensor(candidates)
    batch, width, vocab = logits.shape
    arguments: dict[str, Any] = {
        "temperature": torch.ones(batch),
        "seed": torch.arange(batch),
        "position": torch.arange(batch) * 3,
        "stop_ids": torch.empty(0, dtype=torch.int64),
        "budget": torch.full((batch,), width + 1),
        "draft_probs": torch.full((batch, width - 1, vocab), 1 / vocab),
    }
    return rule(candidates, logits, **(arguments | overrides))


def certain(tokens: list[int], vocab: int = 12) -> torch.Tensor:
    """`[1, R, V]` logits that leave one token per row."""
    logits = torch.full((1, len(tokens), vocab), -INF)
    logits[0, torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return logits


def random_round(
    batch: int, seed: int = 0, width: int = 8, vocab: int = 33
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, width, vocab, generator=generator)
    q = torch.softmax(logits[:, :-1] + 0.3 * torch.randn(batch, width - 1, vocab, generator=generator), dim=2)
    drafts = torch.multinomial(q.view(-1, vocab), 1, generator=generator).view(batch, width - 1)
    return torch.cat((torch.zeros(batch, 1, dtype=torch.int64), drafts), dim=1), logits, q
