"""Shapes of the three models."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

_MOST = 2**31 - 1


def _check_fields(config: Any) -> None:
    """Every field has its declared type and a size a model can have; `ValueError` names the first that does not."""
    for field in fields(config):
        value, kind, name = getattr(config, field.name), str(field.type), f"{type(config).__name__}.{field.name}"
        least = 0 if field.name in ("mask_token_id", "window", "pure") and kind.startswith("int") else 1
        if kind == "bool":
            ok, wanted = isinstance(value, bool), "true or false"
        elif kind in ("float", "float | None"):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            ok = (number and math.isfinite(value) and value > 0) or (value is None and kind != "float")
            wanted = "a positive number"
        elif kind == "tuple[int, ...]":
            ok = isinstance(value, tuple) and len(value) > 0 and all(_is_size(v, 0) for v in value)
            wanted = "a list of layer numbers"
        elif kind == "tuple[MaskRule, ...]":
            ok = isinstance(value, tuple) and all(isinstance(v, MaskRule) for v in value)
            wanted = "a list of mask rules"
        elif kind == "str":
            ok, wanted = isinstance(value, str), "a string"
        elif kind in ("int", "int | None"):
            ok = _is_size(value, least) or (value is None and kind != "int")
            wanted = f"an integer between {least} and {_MOST}"
        else:
            name_of_type = kind.removesuffix(" | None")
            ok = isinstance(value, _CONFIGS[name_of_type]) or (value is None and name_of_type != kind)
            wanted = f"a {name_of_type}"
        if not ok:
            raise ValueError(f"{name} is {value!r}, must be {wanted}")


def _is_size(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


@dataclass(frozen=True)
class ExpertsConfig:
    """Routing of an MLP as in Qwen3.5-MoE and Qwen3-Next: each row goes to `top_k` of `count` experts of
    `intermediate_size`, weighted by the softmax over all; `normalize`: the weights of the chosen add up to 1."""

    count: int
    top_k: int
    intermediate_size: int
    normalize: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.top_k > self.count:
            raise ValueError(f"ExpertsConfig.top_k is {self.top_k}, must be at most the {self.count} experts")


@dataclass(frozen=True)
class LayerConfig:
    """One Qwen3 decoder layer: RMSNorm, RoPE (neox), GQA with q/k norm, SwiGLU; no biases.

    As Qwen3.5 has them: `rotary_dim` leading dimensions of a head are rotated (None: all), `gated` attention multiplies
    its output by the sigmoid of a gate that `q_proj` computes beside each head's query, `gemma_norm` means that every
    norm's factor is `1 + weight`. The MLP is dense, of `intermediate_size`; with `experts` it routes to them, beside a
    shared expert of `intermediate_size`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    rotary_dim: int | None = None
    gated: bool = False
    gemma_norm: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(
                f"LayerConfig.rotary_dim is {self.rotary_dim}, must be even and at most head_dim {self.head_dim}"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"LayerConfig: {self.num_heads} heads must be a multiple of {self.num_kv_heads} key/value heads, "
                f"head_dim {self.head_dim} must be even"
            )


@dataclass(frozen=True)
class TargetConfig:
    """The verified model. Ids at or above `num_valid` exist in the embedding (mask, padding) but are never produced."""

    layer: LayerConfig
    num_layers: int
    vocab_size: int
    num_valid: int
    max_positions: int
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class MTPConfig:
    """The pretrained next-token module: one projection of [embedding; hidden] and `num_layers` decoder layers."""

    layer: LayerConfig
    num_layers: int = 1

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class MaskRule:
    """What a block's slots see in one drafter layer; the words are those of `block_attention`.

    `window` None: the whole context. `window_ref` `anchor`: the last `window` context rows, the same for every slot,
    and the block uncut. `query`: keys nearer than `window` positions to the slot. `causal`: no later slot of the block.
    """

    window: int | None
    window_ref: str = "anchor"
    causal: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.window_ref not in ("anchor", "query"):
            raise ValueError(f"MaskRule.window_ref is {self.window_ref!r}, must be 'anchor' or 'query'")


@dataclass(frozen=True)
class ConvConfig:
    """DFlash2's convolution: `taps` slots of a block, dynamic kernels shared by `group` channels."""

    taps: int
    group: int

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash2's candidate selector: `top_k` candidates a slot, codebooks of `rank`; `output_multiplier` and `softcap`
    (None: off) are applied to the head's logits."""

    vocab_size: int
    rank: int
    top_k: int
    output_multiplier: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class MarkovConfig:
    """DSpark's heads: a bias of `rank` by the token before, and, with `confidence`, the chance of acceptance.
    Candidates are judged as long as the product of these chances is at least `cut` (not tuned)."""

    vocab_size: int
    rank: int
    confidence: bool = True
    cut: float = 0.05

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class RecurrentConfig:
    """Domino's head: a GRU of `state_size` over the tokens so far, a correction of `rank`, none for the first `pure`
    candidates of a round."""

    vocab_size: int
    state_size: int
    rank: int
    pure: int = 1

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class DrafterConfig:
    """The DFlash block model.

    `target_layers` are 0-based target layers whose outputs form the context features; `use_target_features` and
    `use_mtp_features` say which streams the context projection reads. `window` context rows before the block are
    visible (None: all) to every slot, and the whole block; `layer_masks`, where not empty, are the rules of each layer
    instead. `conv` mixes the slots of a block in every layer; `selector`, `markov` and `recurrent`, of which it has one
    at most, choose the tokens of its slots (none: each slot's best alone).
    """

    layer: LayerConfig
    num_layers: int
    target_layers: tuple[int, ...]
    block_size: int
    window: int | None
    mask_token_id: int
    use_target_features: bool = True
    use_mtp_features: bool = False
    layer_masks: tuple[MaskRule, ...] = ()
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    markov: MarkovConfig | None = None
    recurrent: RecurrentConfig | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.conv is not None and self.layer.hidden_size % self.conv.group:
            raise ValueError(f"ConvConfig.group is {self.conv.group}, must divide hidden_size {self.layer.hidden_size}")
        if len(self.heads) > 1:
            raise ValueError(f"DrafterConfig has {' and '.join(self.heads)}, must have one at most")
        if self.layer_masks and (len(self.layer_masks) != self.num_layers or self.window is not None):
            raise ValueError(
                f"DrafterConfig.layer_masks has {len(self.layer_masks)} rules for {self.num_layers} layers and window "
                f"{self.window}, must have one a layer beside no window"
            )

    def mask(self, layer: int) -> MaskRule:
        """The rule of layer `layer`."""
        return self.layer_masks[layer] if self.layer_masks else MaskRule(self.window)

    @property
    def parts(self) -> tuple[str, ...]:
        """What it has beyond DFlash: fields of `PARTS` that are given."""
        return tuple(name for name in PARTS if getattr(self, name) is not None)

    @property
    def heads(self) -> tuple[str, ...]:
        """Of these the one that turns slots into tokens; none: each slot's best token alone."""
        return tuple(name for name in self.parts if name != "conv")

    @property
    def context_size(self) -> int:
        """Width of one context feature row."""
        streams = len(self.target_layers) * self.use_target_features + int(self.use_mtp_features)
        return streams * self.layer.hidden_size


PARTS = {"conv": ConvConfig, "selector": SelectorConfig, "markov": MarkovConfig, "recurrent": RecurrentConfig}
"""Optional parts of a drafter, by field."""
_CONFIGS: dict[str, type] = {kind.__name__: kind for kind in (LayerConfig, ExpertsConfig, *PARTS.values())}
