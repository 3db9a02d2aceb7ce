"""DSpark's heads: a low-rank bias of the logits by the token before, and the chance that a candidate is accepted."""

from __future__ import annotations

import torch
from torch import nn

from dmtp_kernels.models.config import MarkovConfig


class MarkovHead(nn.Module):
    """`bias(v | u) = <W1[u], W2[v]>`, zero at the start."""

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, previous: torch.Tensor) -> torch.Tensor:
        """`[..., V]` added to the logits after the tokens `previous[...]`."""
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """Logit of the chance that the candidate drawn from a slot is accepted, of the slot's hidden state and the Markov
    embedding of the token before it."""

    def __init__(self, width: int, config: MarkovConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(width + config.rank, 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`[...]` in fp32, of `hidden[..., H]` and `embedded[..., r]`."""
        return self.proj(torch.cat([hidden, embedded], dim=-1))[..., 0].float()
