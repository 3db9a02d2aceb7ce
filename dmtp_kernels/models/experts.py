"""An MLP that sends each row to a few of its experts, beside one that every row passes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from dmtp_kernels.models.config import ExpertsConfig, LayerConfig

AT_ONCE = 16
"""Experts whose weights are copied beside one another at a time, off the CPU. Not measured."""


class Experts(nn.Module):
    """The experts' weights, stacked as public checkpoints stack them: `gate_up_proj[E, 2 I, H]`, the gate's rows first,
    and `down_proj[E, H, I]`."""

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.count, 2 * size, width))
        self.down_proj = nn.Parameter(torch.empty(config.count, width, size))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What expert `chosen[n, k]` makes of row `x[n, H]`: `[n, k, H]`.

        On the CPU each chosen expert is read once and none is copied. Elsewhere shapes do not depend on the routing and
        the host reads nothing, so that the call can be captured.
        """
        return self.by_expert(x, chosen) if x.device.type == "cpu" else self.in_blocks(x, chosen)

    def by_expert(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`forward`, one chosen expert after the other."""
        flat = chosen.flatten().numpy()
        order = flat.argsort(kind="stable")
        bounds = flat[order].searchsorted(range(self.gate_up_proj.shape[0] + 1))
        out = x.new_empty(len(flat), x.shape[-1])
        for expert, (start, stop) in enumerate(pairwise(bounds.tolist())):
            if start == stop:
                continue
            places = torch.from_numpy(order[start:stop])
            gate, up = functional.linear(x[places // chosen.shape[1]], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out[places] = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
        return out.view(*chosen.shape, x.shape[-1])

    def in_blocks(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`forward`, in blocks of rows that share an expert, as many as any routing can need.

        That is one block a choice while there are no more choices than experts, else at most two an expert.
        """
        count, choices = self.gate_up_proj.shape[0], chosen.numel()
        rows = 1
        while rows * count < choices:
            rows *= 2
        blocks = min(choices, (choices + count * (rows - 1)) // rows)

        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sizes = torch.zeros(count, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
        last_block = ((sizes + rows - 1) // rows).cumsum(0)
        before = sizes.cumsum(0) - sizes
        first_block = last_block - (sizes + rows - 1) // rows
        # of each choice its place in the blocks: behind those of its expert that come before it
        place = torch.empty_like(flat)
        grouped = flat[order]
        place[order] = first_block[grouped] * rows + torch.arange(choices, device=x.device) - before[grouped]
        source = torch.zeros(blocks * rows, dtype=torch.int64, device=x.device)
        source[place] = torch.arange(choices, device=x.device) // chosen.shape[1]
        # blocks that this routing leaves over work on row 0 for nobody
        expert = torch.searchsorted(last_block, torch.arange(blocks, device=x.device), right=True).clamp_(max=count - 1)

        packed = x[source].view(blocks, rows, x.shape[-1])
        parts = []
        for some, which in zip(packed.split(AT_ONCE), expert.split(AT_ONCE), strict=True):
            gate, up = (some @ self.gate_up_proj[which].mT).chunk(2, dim=-1)
            parts.append((functional.silu(gate) * up) @ self.down_proj[which].mT)
        return torch.cat(parts).flatten(0, 1)[place].view(*chosen.shape, x.shape[-1])


class RoutedMLP(nn.Module):
    """`sum_k w_k expert_k(x) + sigmoid(g . x) shared(x)` over the experts that the router scores highest for `x`.

    Names and arithmetic are Qwen3.5-MoE's and Qwen3-Next's; scores and the sum over experts are in fp32.
    """

    def __init__(self, layer: LayerConfig, config: ExpertsConfig, shared_expert: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(layer.hidden_size, config.count, bias=False)
        self.experts = Experts(layer.hidden_size, config)
        self.shared_expert = shared_expert
        self.shared_expert_gate = nn.Linear(layer.hidden_size, 1, bias=False)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids, both `[n, k]`, of the experts of rows `x[n, H]`."""
        scores = self.gate(x).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = scores.topk(self.config.top_k, dim=-1)
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(rows)
        routed = (self.experts(rows, chosen) * weights[..., None]).sum(dim=1).to(x.dtype)
        return routed.view(x.shape) + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
