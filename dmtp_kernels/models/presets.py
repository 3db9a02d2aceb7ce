"""Shapes of the embedded byte-level checkpoint."""

from __future__ import annotations

from dmtp_kernels.models.config import DrafterConfig, LayerConfig, MTPConfig, TargetConfig

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


def drafter_config(context: tuple[str, ...] = ("target",)) -> DrafterConfig:
    """Shapes of a drafter that reads the given context streams (`target`, `mtp`)."""
    return DrafterConfig(
        layer=_DRAFTER_LAYER,
        num_layers=2,
        target_layers=(1, 2, 3),
        block_size=8,
        window=128,
        mask_token_id=MASK,
        use_target_features="target" in context,
        use_mtp_features="mtp" in context,
    )
