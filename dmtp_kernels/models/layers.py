"""Building blocks of the three models, named as in Qwen3 checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from dmtp_kernels.models.config import LayerConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer, q[..., T, Hq, D], k[..., T, Hkv, D], v[..., T, Hkv, D]) -> [..., T, Hq, D]`: stores the rows and
attends."""


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, statistics in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rotary(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine `[..., T, 1, D]` of absolute `positions[..., T]`, computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[..., None].float() * theta**-exponent
    angle = torch.cat([angle, angle], dim=-1)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x[..., T, heads, D]`, halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        width, head = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return apply_rotary(self.q_norm(q), cos, sin)

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
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        normed = self.input_layernorm(x)
        q = self.self_attn.queries(normed, cos, sin)
        k, v = self.self_attn.keys_values(normed, cos, sin)
        x = x + self.self_attn.o_proj(attend(self.index, q, k, v).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))
