"""Probabilities that came through half precision."""

from __future__ import annotations

import math

import torch

from dmtp_kernels.ops.accept import accept_rejection

KERNEL_OPS = ("accept_rejection",)
TRIALS = 20_000


def accepted(logits: list[float], probabilities: list[float], interpreted: bool) -> torch.Tensor:
    trials = 40 if interpreted else TRIALS
    result = accept_rejection(
        torch.tensor([[0, 1]]).expand(trials, 2).contiguous(),
        torch.tensor([logits, [0.0, 0.0]], dtype=torch.float16).expand(trials, 2, 2),
        temperature=torch.ones(trials),
        seed=torch.arange(trials),
        position=torch.full((trials,), 7),
        stop_ids=torch.empty(0, dtype=torch.int64),
        budget=torch.full((trials,), 9),
        draft_probs=torch.tensor([probabilities], dtype=torch.float16).expand(trials, 1, 2),
    )
    assert (result.status == 0).all()
    assert ((result.bonus >= 0) & (result.bonus < 2)).all()
    return result.accept_len


def test_row_138_a_probability_that_underflows_accepts_nothing(backend: str) -> None:
    """mlxcel#992: p = 1e-9 against q = 0.9 is refused; a q that fp16 stores as 0 is refused and divides nothing."""
    tiny = math.log(1e-9)
    assert torch.tensor(1e-9, dtype=torch.float16) == 0
    interpreted = backend == "triton"
    assert accepted([0.0, tiny], [0.1, 0.9], interpreted).sum() == 0
    assert accepted([0.0, tiny], [1.0, 1e-9], interpreted).sum() == 0
    assert accepted([tiny, 0.0], [1.0, 1e-9], interpreted).sum() == 0
    # the control: the same rows with the candidate likely under both
    assert accepted([tiny, 0.0], [0.1, 0.9], interpreted).float().mean() == 1
