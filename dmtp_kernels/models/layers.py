"""Building blocks of the three models, named as in Qwen3 checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from dmtp_kernels.models.config import LayerConfig
from dmtp_kernels.models.experts import RoutedMLP

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer, q[..., T, Hq, D], k[..., T, Hkv, D], v[..., T, Hkv, D]) -> [..., T, Hq, D]`: stores the rows and
attends."""


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, statistics in fp32; `gemma`: the factor is `1 + weight`, in fp32 too."""

    def __init__(self, size: int, eps: float, gemma: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if gemma else torch.ones(size))
        self.eps = eps
        self.gemma = gemma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.gemma:
            return (wide * (1 + self.weight.float())).to(x.dtype)
        return wide.to(x.dtype) * self.weight


def rotary(positions: torch.Tensor, layer: LayerConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine `[..., T, 1, rotated dimensions]` of absolute `positions[..., T]`, computed in fp32."""
    size = layer.rotary_dim or layer.head_dim
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angle = positions[..., None].float() * layer.rope_theta**-exponent
    angle = torch.cat([angle, angle], dim=-1)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading dimensions of `x[..., T, heads, D]` that `cos` covers, halves convention."""
    if cos.shape[-1] < x.shape[-1]:
        rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([apply_rotary(rotated, cos, sin), rest], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        width, head, gemma = config.hidden_size, config.head_dim, config.gemma_norm
        self.q_proj = nn.Linear(width, config.num_heads * head * (2 if config.gated else 1), bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps, gemma)
        self.k_norm = RMSNorm(head, config.rms_norm_eps, gemma)

    def queries(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries and, where the attention is gated, the gates of its output."""
        q, gate = self.q_proj(x).unflatten(-1, (self.config.num_heads, -1)), None
        if self.config.gated:
            q, gate = q.chunk(2, dim=-1)  # a head's gate follows its query
        return apply_rotary(self.q_norm(q), cos, sin), gate

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.k_proj(x).unflatten(-1, (-1, self.config.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return apply_rotary(self.k_norm(k), cos, sin), v


class MLP(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LayerConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(config)
        self.mlp = MLP(config) if config.experts is None else RoutedMLP(config, config.experts, MLP(config))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.gemma_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.gemma_norm)

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The attention sublayer, of its normalised input."""
        q, gate = self.self_attn.queries(x, cos, sin)
        k, v = self.self_attn.keys_values(x, cos, sin)
        seen = attend(self.index, q, k, v)
        if gate is not None:
            seen = seen * gate.sigmoid()
        return self.self_attn.o_proj(seen.flatten(-2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
