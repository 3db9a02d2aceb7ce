"""The target model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from dmtp_kernels.models.config import TargetConfig
from dmtp_kernels.models.layers import Attend, DecoderLayer, RMSNorm, rotary


class TargetOutput(NamedTuple):
    """`hidden[..., T, H]` after the final norm and `features[..., T, n*H]`, the asked layers' outputs side by side."""

    hidden: torch.Tensor
    features: torch.Tensor


class Target(nn.Module):
    """Dense Qwen3-shaped causal language model."""

    keeps_rows = False
    """Whether it keeps keys and values itself, so that a decode loop has no layers to cache for it."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.layer.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, i) for i in range(config.num_layers))
        self.norm = RMSNorm(width, config.layer.rms_norm_eps, config.layer.gemma_norm)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run `ids[..., T]` at absolute `positions[..., T]`."""
        x = self.embed_tokens(ids)
        cos, sin = rotary(positions, self.config.layer, x.dtype)
        outputs = []
        for block in self.layers:
            x = block(x, cos, sin, attend)
            outputs.append(x)
        picked = [outputs[i] for i in feature_layers]
        features = torch.cat(picked, dim=-1) if picked else x.new_empty((*x.shape[:-1], 0))
        return TargetOutput(self.norm(x), features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., num_valid]` logits of the ids that may be produced."""
        return nn.functional.linear(hidden, self.lm_head.weight[: self.config.num_valid])
