"""Shapes of the three models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerConfig:
    """One dense Qwen3 decoder layer: RMSNorm, RoPE (neox, full), GQA with q/k norm, SwiGLU; no biases."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class TargetConfig:
    """The verified model. Ids at or above `num_valid` exist in the embedding (mask, padding) but are never produced."""

    layer: LayerConfig
    num_layers: int
    vocab_size: int
    num_valid: int
    max_positions: int
    tie_embeddings: bool = True


@dataclass(frozen=True)
class MTPConfig:
    """The pretrained next-token module: one projection of [embedding; hidden] and `num_layers` decoder layers."""

    layer: LayerConfig
    num_layers: int = 1


@dataclass(frozen=True)
class DrafterConfig:
    """The DFlash block model.

    `target_layers` are 0-based target layers whose outputs form the context features; `use_target_features` and
    `use_mtp_features` say which streams the context projection reads. `window` context rows before the block are
    visible (None: all).
    """

    layer: LayerConfig
    num_layers: int
    target_layers: tuple[int, ...]
    block_size: int
    window: int | None
    mask_token_id: int
    use_target_features: bool = True
    use_mtp_features: bool = False

    @property
    def context_size(self) -> int:
        """Width of one context feature row."""
        streams = len(self.target_layers) * self.use_target_features + int(self.use_mtp_features)
        return streams * self.layer.hidden_size
