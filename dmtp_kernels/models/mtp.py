"""The multi-token-prediction module: one row per (token at p+1, target hidden of p), predicting the token at p+2."""

from __future__ import annotations

import torch
from torch import nn

from dmtp_kernels.models.config import MTPConfig
from dmtp_kernels.models.layers import Attend, DecoderLayer, RMSNorm, rotary


class MTP(nn.Module):
    """Embedding half first in the projection, as in Qwen3.5/3.6 checkpoints; the head and embedding are the
    target's."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.config = config
        width, eps, gemma = config.layer.hidden_size, config.layer.rms_norm_eps, config.layer.gemma_norm
        self.pre_fc_norm_embedding = RMSNorm(width, eps, gemma)
        self.pre_fc_norm_hidden = RMSNorm(width, eps, gemma)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, i) for i in range(config.num_layers))
        self.norm = RMSNorm(width, eps, gemma)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Rows at `positions[..., T]`.

        `embeds[..., T, H]` is the plain embedding of the token at position p+1, `hidden[..., T, H]` the target's
        hidden of position p after its final norm. Returns `[..., T, H]` after the module's final norm: what the head
        reads.
        """
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1))
        cos, sin = rotary(positions, self.config.layer, x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, attend)
        return self.norm(x)
