"""Muon for matrices, Adam for embeddings and norms, with fp32 masters of bf16 weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from dmtp_kernels.models.selector import CandidateSelector

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic Newton-Schulz of Muon (Jordan et al. 2024): singular values end near 1, not at 1."""


def orthogonalise(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Replace each matrix of `update[n, rows, cols]` by an approximation of its orthogonal polar factor, in bf16."""
    a, b, c = _COEFFICIENTS
    x = update.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _Stack:
    """All parameters of one shape and rule, stacked so that one call updates them all."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.master = torch.stack([p.detach().float() for p in parameters])
        self.weight = self.master.to(parameters[0].dtype)
        self.grad = torch.zeros_like(self.weight)
        for i, parameter in enumerate(parameters):
            parameter.data = self.weight[i]
            parameter.grad = self.grad[i]
        self.first = torch.zeros_like(self.master)
        self.second = torch.zeros_like(self.master)


class Optimizer:
    """One update rule for every parameter of the given modules; their weights become views of the stacks."""

    def __init__(self, modules: dict[str, nn.Module], *, muon_lr: float = 0.02, adam_lr: float = 3e-3) -> None:
        self.muon_lr, self.adam_lr, self.steps = muon_lr, adam_lr, 0
        groups: dict[tuple[bool, tuple[int, ...]], list[nn.Parameter]] = defaultdict(list)
        for module in modules.values():
            tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
            for selector in (m for m in module.modules() if isinstance(m, CandidateSelector)):
                tables |= {id(selector.predecessor_codebook), id(selector.successor_codebook)}
            for parameter in module.parameters():
                is_matrix = parameter.dim() == 2 and id(parameter) not in tables
                groups[is_matrix, tuple(parameter.shape)].append(parameter)
        self.stacks = [(is_matrix, _Stack(parameters)) for (is_matrix, _), parameters in groups.items()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients with both learning rates times `scale`, then clear them."""
        self.steps += 1
        for is_matrix, stack in self.stacks:
            grad = stack.grad.float()
            if is_matrix:
                stack.first.lerp_(grad, 0.05)
                rows, cols = grad.shape[-2:]
                update = orthogonalise(grad.lerp(stack.first, 0.95)).float()
                stack.master.add_(update, alpha=-self.muon_lr * scale * max(1.0, rows / cols) ** 0.5)
            else:
                stack.first.lerp_(grad, 0.1)
                stack.second.lerp_(grad.square(), 0.05)
                first = stack.first / (1 - 0.9**self.steps)
                second = stack.second / (1 - 0.95**self.steps)
                stack.master.addcdiv_(first, second.sqrt() + 1e-8, value=-self.adam_lr * scale)
            stack.weight.copy_(stack.master)
            stack.grad.zero_()

    def state(self) -> dict[str, object]:
        """Everything a resumed run needs to continue bit for bit."""
        return {"steps": self.steps, "stacks": [(s.master, s.first, s.second) for _, s in self.stacks]}

    def restore(self, state: dict[str, object]) -> None:
        self.steps = state["steps"]  # type: ignore[assignment]
        for (_, stack), saved in zip(self.stacks, state["stacks"], strict=True):  # type: ignore[call-overload]
            for mine, theirs in zip((stack.master, stack.first, stack.second), saved, strict=True):
                mine.copy_(theirs)
            stack.weight.copy_(stack.master)
