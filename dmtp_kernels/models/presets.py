"""Shapes of the embedded byte-level checkpoint."""

from __future__ import annotations

from typing import Any

from dmtp_kernels.models.config import (
    ConvConfig,
    DrafterConfig,
    LayerConfig,
    MarkovConfig,
    MTPConfig,
    RecurrentConfig,
    SelectorConfig,
    TargetConfig,
)

BOS, EOS, MASK = 256, 257, 258
"""Ids after the 256 bytes: start of text, end of text, the drafter's mask. Id 259 is padding and never used."""

TARGET = TargetConfig(
    layer=LayerConfig(hidden_size=192, intermediate_size=512, num_heads=6, num_kv_heads=2, head_dim=32),
    num_layers=4,
    vocab_size=260,
    num_valid=258,
    max_positions=2048,
)
TINY_MTP = MTPConfig(layer=TARGET.layer)
_DRAFTER_LAYER = LayerConfig(hidden_size=192, intermediate_size=320, num_heads=6, num_kv_heads=2, head_dim=32)


_PARTS: dict[str, Any] = {
    "conv": ConvConfig(taps=2, group=16),
    "selector": SelectorConfig(TARGET.vocab_size, rank=32, top_k=16),
    "markov": MarkovConfig(TARGET.vocab_size, rank=32),
    "recurrent": RecurrentConfig(TARGET.vocab_size, state_size=64, rank=32),
}


def drafter_config(
    context: tuple[str, ...] = ("target",), parts: tuple[str, ...] = (), block_size: int = 8
) -> DrafterConfig:
    """Shapes of a drafter that reads the given context streams (`target`, `mtp`) and has the given parts."""
    return DrafterConfig(
        layer=_DRAFTER_LAYER,
        num_layers=2,
        target_layers=(1, 2, 3),
        block_size=block_size,
        window=128,
        mask_token_id=MASK,
        use_target_features="target" in context,
        use_mtp_features="mtp" in context,
        **{part: _PARTS[part] for part in parts},
    )
