"""Shapes of the source's two models, their MTP module and their drafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Heads of one attention layer; `gated`: the query projection also makes an output gate."""

    q_heads: int
    kv_heads: int
    dim: int
    gated: bool = False


@dataclass(frozen=True)
class Delta:
    """Heads of one gated delta net layer; its state is `[v_heads, dim, dim]` a request."""

    qk_heads: int
    v_heads: int
    dim: int


@dataclass(frozen=True)
class FeedForward:
    """A gated MLP of width `width`; with experts, each token runs `active` of them and a shared one."""

    width: int
    experts: int = 0
    active: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Model:
    """Target, MTP module (one attention layer of the target's shape) and drafter of one checkpoint."""

    name: str
    hidden: int
    vocab: int
    attention: Attention
    attention_layers: int
    delta: Delta
    delta_layers: int
    feed_forward: FeedForward
    drafter_attention: Attention
    drafter_feed_forward: FeedForward
    drafter_layers: int = 5
    drafter_features: int = 5
    window: int = 4096


QWEN_35B = Model(
    name="Qwen3.6-35B-A3B",
    hidden=2048,
    vocab=248_320,
    attention=Attention(16, 2, 256, gated=True),
    attention_layers=10,
    delta=Delta(16, 32, 128),
    delta_layers=30,
    feed_forward=FeedForward(512, experts=256, active=8, shared=512),
    drafter_attention=Attention(32, 4, 128),
    drafter_feed_forward=FeedForward(6144),
)
QWEN_27B = Model(
    name="Qwen3.6-27B",
    hidden=5120,
    vocab=248_320,
    attention=Attention(24, 4, 256, gated=True),
    attention_layers=16,
    delta=Delta(16, 48, 128),
    delta_layers=48,
    feed_forward=FeedForward(17_408),
    drafter_attention=Attention(32, 8, 128),
    drafter_feed_forward=FeedForward(17_408),
)
MODELS = {"35B": QWEN_35B, "27B": QWEN_27B}
ASSUMPTIONS = (
    "35B: 40 layers (30 gated delta net, 10 attention), hidden 2048, 16 query and 2 kv heads of 256, 16 qk and 32 v "
    "heads of 128, 256 experts of width 512, 8 routed and a shared one (the model card of Qwen3.6-35B-A3B; the same in "
    "THUDM/slime scripts/models/qwen3.5-35B-A3B.sh).",
    "27B: 64 layers (48 and 16), hidden 5120, 24 query and 4 kv heads of 256, MLP 17408 (THUDM/slime "
    "scripts/models/qwen3.5-27B.sh; Qwen3.6's is assumed to be the same), 16 qk and 48 v heads of 128.",
    "Drafter: 5 layers, window 4096, 5 target features (the source); heads and MLP as in the public DFlash "
    "configurations (35B: 32 and 4 heads of 128, MLP 6144; 27B: 32 and 8, 17408). The source's own is not public.",
    "MTP: one attention layer with the target's feed-forward (experts too, for 35B) over 8 rows a request.",
)
