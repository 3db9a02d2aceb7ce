"""The DFlash drafter: a block of slots attends to projected target features and to itself, without a causal mask."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from dmtp_kernels.models.config import DrafterConfig
from dmtp_kernels.models.dflash2 import ConvolvedLayer
from dmtp_kernels.models.layers import Attend, DecoderLayer, RMSNorm, rotary
from dmtp_kernels.models.markov import ConfidenceHead, MarkovHead
from dmtp_kernels.models.recurrent import PrefixCorrection
from dmtp_kernels.models.selector import CandidateSelector


class Drafter(nn.Module):
    """Tensor names follow public DFlash checkpoints; embedding and head are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width, eps, gemma = config.layer.hidden_size, config.layer.rms_norm_eps, config.layer.gemma_norm
        self.fc = nn.Linear(config.context_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps, gemma)
        self.layers = nn.ModuleList(_layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(width, eps, gemma)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(width, config.selector)
        if config.markov is not None:
            self.markov_head = MarkovHead(config.markov)
            if config.markov.confidence:
                self.confidence_head = ConfidenceHead(width, config.markov)
        if config.recurrent is not None:
            self.logit_head = PrefixCorrection(width, config.recurrent)

    def context_keys_values(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, K and V `[..., T, Hkv, D]` of context rows `features[..., T, context_size]` at `positions[...,
        T]`."""
        context = self.hidden_norm(self.fc(features))
        cos, sin = rotary(positions, self.config.layer, context.dtype)
        return [cast(DecoderLayer, block).self_attn.keys_values(context, cos, sin) for block in self.layers]

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Block slots `embeds[..., S, H]` at `positions[..., S]`; the hidden of slot p predicts the token at position
        p."""
        x = embeds
        cos, sin = rotary(positions, self.config.layer, x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, attend)
        return self.norm(x)


def _layer(config: DrafterConfig, index: int) -> DecoderLayer:
    return (
        DecoderLayer(config.layer, index) if config.conv is None else ConvolvedLayer(config.layer, index, config.conv)
    )
