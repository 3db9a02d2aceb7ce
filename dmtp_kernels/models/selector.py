"""DFlash2's candidate selector: which of a slot's best tokens follows the token before it."""

from __future__ import annotations

import torch
from torch import nn

from dmtp_kernels.models.config import SelectorConfig


class CandidateSelector(nn.Module):
    """`score(v | u) = unary(v) + <P[u] * (W h), Q[v]>` for the candidates v of a slot, u being the token before it.

    `unary` is the head's logit times `output_multiplier`, then `c tanh(x / c)` where `softcap` is c. The transition
    part starts at zero.
    """

    def __init__(self, width: int, config: SelectorConfig) -> None:
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.rank)
        self.predecessor_codebook = nn.Parameter(torch.randn(size) * config.rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(size))
        self.hidden_projection = nn.Linear(width, config.rank, bias=False)

    def unary(self, logits: torch.Tensor) -> torch.Tensor:
        """What the head's `logits` of any shape count for."""
        logits = logits * self.config.output_multiplier
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def scores(
        self, unary: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """`[..., N]` scores of `candidates[..., N]` with their `unary[..., N]`, after the tokens `previous[...]`, for
        slots of `hidden[..., H]`."""
        context = self.predecessor_codebook[previous] * self.hidden_projection(hidden)  # [..., r]
        return unary + (self.successor_codebook[candidates] @ context[..., None])[..., 0]
