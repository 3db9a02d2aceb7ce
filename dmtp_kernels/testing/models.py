"""Small random trios for tests of the decode loop and of the checkpoint reader."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dmtp_kernels.decode.method import METHODS, SHIPPED
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.config import (
    ConvConfig,
    DrafterConfig,
    ExpertsConfig,
    LayerConfig,
    MarkovConfig,
    MTPConfig,
    RecurrentConfig,
    SelectorConfig,
    TargetConfig,
)
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target


def tiny_checkpoint(
    seed: int = 0,
    *,
    vocab_size: int = 20,
    num_valid: int | None = None,
    mask_token_id: int | None = None,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    drafter_layers: int = 2,
    target_layers: tuple[int, ...] = (0, 1),
    window: int | None = 16,
    max_positions: int = 512,
    tie_embeddings: bool = False,
    shared_bias: float = 1.0,
    mtp_experts: ExpertsConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> Checkpoint:
    """A random trio with a drafter for every drafted method and non-zero fusion weights, a function of its arguments.

    The last id is the mask and, with `num_valid` unset, the only id that is never produced. `shared_bias` is a
    component common to all embeddings: it makes some tokens likely in all three models, so that candidates are accepted
    now and then (0: almost never). Every norm weight differs from 1: a norm left out or swapped changes the output.
    """
    layer = LayerConfig(hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim)
    mask = vocab_size - 1 if mask_token_id is None else mask_token_id
    valid = vocab_size - 1 if num_valid is None else num_valid
    target = Target(TargetConfig(layer, num_layers, vocab_size, valid, max_positions, tie_embeddings))
    mtp = MTP(MTPConfig(replace(layer, experts=mtp_experts)))
    parts = {
        "conv": ConvConfig(2, 4),
        "selector": SelectorConfig(vocab_size, 6, min(16, valid - 1), softcap=20.0),
        "markov": MarkovConfig(vocab_size, 6, cut=0.2),
        "recurrent": RecurrentConfig(vocab_size, 12, 6),
    }
    drafters, fusions = {}, {}
    for name, method in METHODS.items():
        if method.drafter is None:
            continue
        own: Any = {"use_target_features": "target" in method.context, "use_mtp_features": "mtp" in method.context}
        own |= {part: parts[part] for part in method.parts}
        config = DrafterConfig(layer, drafter_layers, target_layers, method.block, window, mask, **own)
        drafters[name] = Drafter(config)
        if method.fusion != "none":
            fusions[name] = FusionModule(method.fusion, hidden_size, layer.rms_norm_eps, rank=4)
    checkpoint = Checkpoint(target, mtp, drafters, fusions)
    generator, later = (torch.Generator().manual_seed(s) for s in (seed, seed + (1 << 32)))
    with torch.no_grad():
        for key, module in checkpoint.modules().items():
            # drafters with parts have numbers of their own: they change nobody else's
            own_numbers = key.partition(".")[2] in METHODS.keys() - {*SHIPPED}
            _randomise(module, later if own_numbers else generator)
        common = torch.randn(hidden_size, generator=generator)
        target.embed_tokens.weight += shared_bias * common
        # what the head reads keeps the direction of the inputs, in MTP too
        mtp.fc.weight += 0.5 * torch.eye(hidden_size).repeat(1, 2)
    return checkpoint.freeze(dtype)


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.2 * noise)
        elif isinstance(module, Target) and parameter is module.embed_tokens.weight:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise / math.sqrt(parameter.shape[1]))
