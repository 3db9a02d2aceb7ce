"""Muon, Adam and the fp32 masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmtp_kernels.training.optim import Optimizer, orthogonalise


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)], ids=["square", "wide", "tall"])
def test_update_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalise(gradient).float())
    assert values.min() > 0.3 and values.max() < 1.4
    # the direction is kept: the update still points along the gradient
    assert ((orthogonalise(gradient).float() * gradient).sum((1, 2)) > 0).all()


def test_vectors_follow_adam() -> None:
    torch.manual_seed(0)
    mine, theirs = nn.LayerNorm(8, bias=False), nn.LayerNorm(8, bias=False)
    optimizer = Optimizer({"norm": mine}, adam_lr=0.01)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.9, 0.95))
    for step in range(5):
        gradient = torch.randn(8)
        assert mine.weight.grad is not None
        mine.weight.grad.copy_(gradient)
        theirs.weight.grad = gradient.clone()
        optimizer.step(1.0)
        reference.step()
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-5, atol=1e-6, msg=f"step {step}")


def test_embedding_tables_are_not_treated_as_matrices() -> None:
    table = nn.Embedding(4, 4)
    optimizer = Optimizer({"table": table})
    assert [is_matrix for is_matrix, _ in optimizer.stacks] == [False]


def test_steps_below_bf16_resolution_add_up() -> None:
    norm = nn.LayerNorm(4, bias=False).bfloat16()
    optimizer = Optimizer({"norm": norm}, adam_lr=1e-4)
    for _ in range(100):
        assert norm.weight.grad is not None
        norm.weight.grad.fill_(1.0)
        optimizer.step(1.0)
    # one step of 1e-4 rounds away in bf16 next to 1; a hundred of them must not
    assert norm.weight.float().mean().item() == pytest.approx(0.99, abs=0.004)


def test_restored_state_continues_bit_for_bit() -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)).bfloat16()
        return module, Optimizer({"m": module})

    def advance(module: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
            module(x).square().sum().backward()
            optimizer.step(0.5)

    whole, optimizer = make()
    advance(whole, optimizer, 0, 6)
    first, optimizer = make()
    advance(first, optimizer, 0, 3)
    resumed, fresh = make()
    fresh.restore(optimizer.state())
    advance(resumed, fresh, 3, 6)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
