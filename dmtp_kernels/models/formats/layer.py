"""The fields of a decoder layer that all public configurations share."""

from __future__ import annotations

from typing import Any

from dmtp_kernels.models.config import ExpertsConfig, LayerConfig
from dmtp_kernels.models.formats.fields import Fields, same

MOST_LAYERS = 4096
_DENSE, _SHARED = "intermediate_size", "shared_expert_intermediate_size"


def read_layer(
    config: Fields,
    *,
    gated: bool = False,
    gemma_norm: bool = False,
    partial: bool = False,
    experts: ExpertsConfig | None = None,
) -> LayerConfig:
    """Layer of a configuration of the Qwen3 family; `partial`: how much of a head is rotated has to be said.

    Beside `experts` the width of the shared expert is read.

    Raises CheckpointError on biases, another activation, scaled RoPE, quantised weights, and on anything missing.
    """
    config.refuse("attention_bias", (False,), "projections with a bias are not supported")
    config.refuse("mlp_bias", (False,), "projections with a bias are not supported")
    config.refuse("hidden_act", ("silu",), "the only supported activation is 'silu'")
    config.refuse("quantization_config", (), "quantised weights are not supported")
    head_dim = config.integer("head_dim")
    theta, factor = _rope(config, partial)
    rotary = head_dim * factor
    if rotary != int(rotary) or int(rotary) % 2:
        config.fail(f"partial_rotary_factor {factor} of head_dim {head_dim} is {rotary}, must be an even number")
    sizes: dict[str, Any] = {
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer(_DENSE if experts is None else _SHARED),
        "num_heads": config.integer("num_attention_heads"),
        "num_kv_heads": config.integer("num_key_value_heads"),
        "rotary_dim": None if int(rotary) == head_dim else int(rotary),
    }
    eps = config.number("rms_norm_eps")
    try:
        return LayerConfig(
            **sizes,
            head_dim=head_dim,
            rope_theta=theta,
            rms_norm_eps=eps,
            gated=gated,
            gemma_norm=gemma_norm,
            experts=experts,
        )
    except ValueError as error:
        config.fail(str(error))


def _rope(config: Fields, partial: bool) -> tuple[float, float]:
    """Base and rotated share. Transformers 4 has both at the top level, 5 in `rope_parameters`."""
    parameters = config.section("rope_parameters")
    for scaling in (parameters, config.section("rope_scaling")):
        for key in ("rope_type", "type"):
            scaling.refuse(key, ("default",), "scaled RoPE is not supported")
        if any(isinstance(value, dict) for value in scaling.values.values()):
            scaling.fail(f"{scaling.name('*')}: one RoPE per layer type is not supported")
    theta = same(parameters, config, "rope_theta").number("rope_theta")
    holder = same(parameters, config, "partial_rotary_factor")
    factor = holder.number("partial_rotary_factor", None if partial else 1.0)
    if factor > 1:
        holder.wrong("partial_rotary_factor", "at most 1")
    return theta, factor


def read_experts(config: Fields) -> ExpertsConfig:
    """Routing of every layer's MLP. Raises CheckpointError where some layers are dense, and on anything missing."""
    config.refuse("decoder_sparse_step", (1,), "layers without experts among those with are not supported")
    config.refuse("mlp_only_layers", ([],), "layers without experts among those with are not supported")
    count = config.integer("num_experts")
    return ExpertsConfig(
        count=count,
        top_k=config.integer("num_experts_per_tok", most=count),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", True),
    )


def experts_fields(experts: ExpertsConfig) -> dict[str, object]:
    """What `read_experts` reads, as a configuration has it."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
    }


def layer_fields(layer: LayerConfig) -> dict[str, object]:
    """What `read_layer` reads, as a configuration has it."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": layer.rope_theta}
    if layer.rotary_dim is not None:
        rope["partial_rotary_factor"] = layer.rotary_dim / layer.head_dim
    return {
        "hidden_size": layer.hidden_size,
        _DENSE if layer.experts is None else _SHARED: layer.intermediate_size,
        **({} if layer.experts is None else experts_fields(layer.experts)),
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": rope,
        # readers older than Transformers 5 look here
        "rope_theta": layer.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
