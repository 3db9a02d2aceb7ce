"""Domino's head: a recurrent state over the tokens so far corrects the logits of a slot."""

from __future__ import annotations

import torch
from torch import nn

from dmtp_kernels.models.config import RecurrentConfig


class PrefixGRU(nn.Module):
    """One GRU layer without biases, a step at a time; tensors named as torch's own."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.randn(3 * size, width) * width**-0.5)
        self.weight_hh_l0 = nn.Parameter(torch.randn(3 * size, size) * size**-0.5)

    def forward(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state `[n, size]` after `state[n, size]` has seen `embedded[n, H]`."""
        return torch.gru_cell(embedded, state, self.weight_ih_l0, self.weight_hh_l0)


class PrefixCorrection(nn.Module):
    """`bias = U silu(D [h; s])` of a slot's hidden h and the state s after the token before it; zero at the start.

    The state starts at zero and sees the embeddings of the anchor and of every token after it. The first `pure`
    candidates of a round keep the logits as they are.
    """

    def __init__(self, width: int, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.prefix_gru = PrefixGRU(width, config.state_size)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.state_size, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, config.vocab_size, bias=False),
        )
        nn.init.zeros_(self.embed_proj[2].weight)  # type: ignore[arg-type]

    def start(self, like: torch.Tensor) -> torch.Tensor:
        """`[n, size]`, the state before the anchor of blocks `like[n, H]`."""
        return like.new_zeros(like.shape[0], self.config.state_size)

    def forward(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """`[..., V]` added to the logits of slots `hidden[..., H]` whose predecessors left `state[..., size]`."""
        return self.embed_proj(torch.cat([hidden, state], dim=-1))
