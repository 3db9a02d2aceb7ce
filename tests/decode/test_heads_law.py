"""Heads that walk keep the target's law: accepted candidates are its own text, sampled text has its distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.decode import heads
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS, SHIPPED
from dmtp_kernels.decode.request import Completion, Request
from tests.decode.test_distribution import CHECKPOINT, p_value, sampled_counts

WALKS = [name for name in METHODS if name not in SHIPPED]
RUNS = 4_000


@torch.no_grad()
@pytest.mark.parametrize("method", WALKS)
def test_accepted_walks_are_the_autoregressive_text(method: str) -> None:
    """Four tokens to choose from: candidates are accepted several at a time, and the text is the target's own."""
    requests = [
        Request(tuple((seed * i) % 4 for i in range(1, 4 + seed)), 60, temperature=0.5 * (seed % 2), seed=seed)
        for seed in range(1, 7)
    ]

    def decoded(name: str, verification: str = "target") -> list[Completion]:
        return Engine(CHECKPOINT, name, max_batch=3, max_tokens=96, page_size=8, verification=verification).run(
            requests
        )

    plain, several = decoded("autoregressive"), 0
    for verification in ("target", "rejection", "block"):
        got = decoded(method, verification)
        rows = range(6) if verification == "target" else range(1, 6, 2)
        assert all(got[row].tokens == plain[row].tokens for row in rows)
        several += sum(sum(c.histogram[2:]) for c in got)
    assert several > 5


CASES = [
    ("dflash2", "rejection", 1),
    ("dmtp_dflash2", "block", 1),
    ("dspark", "block", 1),
    ("dmtp_dspark", "rejection", 1),
    ("domino", "rejection", 1),
    ("dmtp_domino", "block", 3),
]


@pytest.mark.parametrize(("method", "verification", "mtp_steps"), CASES)
def test_output_has_the_targets_law(method: str, verification: str, mtp_steps: int) -> None:
    assert p_value(sampled_counts(method, RUNS, verification, mtp_steps)) > 0.001


@pytest.mark.parametrize("method", ["dflash2", "dmtp_dspark", "domino"])
def test_a_walk_that_lies_about_its_weights_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = heads.draw

    def evenly(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        index, weights = original(*args)
        assert weights is not None
        return index, torch.ones_like(weights)

    monkeypatch.setattr(heads, "draw", evenly)
    assert p_value(sampled_counts(method, RUNS, "rejection")) < 0.001
