"""Published configurations, as far as they are public, give the tensors that their checkpoints are said to have.

Sources: SpecForge's configs/qwen3.6-27b-dflash2.json and its DFlash configs for Qwen3.5/3.6, the text configuration of
Qwen3.6-27B, public inventories of its `mtp.*` tensors, and for the model with experts the tensors that a public loader
requires and transformers' defaults for Qwen3.5-35B-A3B.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels.models import MTP, Drafter
from dmtp_kernels.models.config import ExpertsConfig, MaskRule
from dmtp_kernels.models.formats.dflash import parse
from dmtp_kernels.models.formats.dflash2 import shapes
from dmtp_kernels.models.formats.fields import Fields, read_json
from dmtp_kernels.models.formats.qwen_mtp import parse as parse_mtp

COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16",
    "eos_token_id": 248044, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 262144,
    "model_type": "qwen3", "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
DFLASH2_27B: dict[str, Any] = COMMON | {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "head_dim": 128, "hidden_size": 5120,
    "dflash_config": {
        "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "intermediate_size": 17408, "layer_types": ["sliding_attention"] * 5, "max_window_layers": 5,
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 64,
    "pad_token_id": 248044, "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048, "transformers_version": "5.8.1", "use_sliding_window": True,
}  # fmt: skip
DFLASH_35B: dict[str, Any] = COMMON | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]}, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "layer_types": ["full_attention"] * 8, "num_attention_heads": 32,
    "num_hidden_layers": 8, "num_key_value_heads": 4, "num_target_layers": 40, "rope_scaling": None,
    "rope_theta": 10000000,
}  # fmt: skip
TEXT_27B: dict[str, Any] = {
    "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408, "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
    "num_hidden_layers": 64, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "vocab_size": 248320,
}  # fmt: skip
TEXT_35B: dict[str, Any] = {
    "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_experts": 256,
    "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
}  # fmt: skip


def fields(tmp_path: Path, config: dict[str, Any]) -> Fields:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return Fields(path, read_json(path))


def of(module: torch.nn.Module) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def layer(prefix: str, sizes: tuple[int, int, int, int, int], gates: int = 1) -> dict[str, list[int]]:
    hidden, inner, heads, kv_heads, head = sizes
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        f"{attention}.q_proj.weight": [gates * heads * head, hidden],
        f"{attention}.k_proj.weight": [kv_heads * head, hidden],
        f"{attention}.v_proj.weight": [kv_heads * head, hidden],
        f"{attention}.o_proj.weight": [hidden, heads * head],
        f"{attention}.q_norm.weight": [head],
        f"{attention}.k_norm.weight": [head],
        f"{mlp}.gate_proj.weight": [inner, hidden],
        f"{mlp}.up_proj.weight": [inner, hidden],
        f"{mlp}.down_proj.weight": [hidden, inner],
        f"{prefix}.input_layernorm.weight": [hidden],
        f"{prefix}.post_attention_layernorm.weight": [hidden],
    }


@pytest.mark.parametrize(
    ("published", "sizes", "layers", "features"),
    [(DFLASH2_27B, (5120, 17408, 32, 8, 128), 5, 25600), (DFLASH_35B, (2048, 6144, 32, 4, 128), 8, 10240)],
    ids=["27B", "35B-A3B"],
)
def test_drafters(
    tmp_path: Path, published: dict[str, Any], sizes: tuple[int, int, int, int, int], layers: int, features: int
) -> None:
    config, _, vocab_size = parse(fields(tmp_path, published), None)
    with torch.device("meta"):
        found = of(Drafter(config))
    hidden = sizes[0]
    wanted = {"fc.weight": [hidden, features], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    for i in range(layers):
        wanted |= layer(f"layers.{i}", sizes)
    assert found == wanted
    assert (config.mask_token_id, vocab_size, config.layer.rope_theta) == (248070, 248320, 1e7)


def test_dflash2_slides_from_each_slot_and_has_its_own_tensors(tmp_path: Path) -> None:
    config, extra, vocab_size = parse(fields(tmp_path, DFLASH2_27B), None)
    assert config.block_size == 8 and config.layer_masks == (MaskRule(2048, "query", False),) * 5
    assert extra is not None and (extra.selector_top_k, extra.output_multiplier, extra.softcap) == (16, 1.0, None)
    wanted: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (248320, 256),
        "candidate_selector.successor_codebook": (248320, 256),
        "candidate_selector.hidden_projection.weight": (256, 5120),
    }
    for i in range(5):
        for place in ("attention_conv", "mlp_conv"):
            wanted[f"layers.{i}.{place}.base_kernel"] = (2, 2, 5120)
            wanted[f"layers.{i}.{place}.kernel_projection.weight"] = (1280, 5120)
    assert shapes(extra, config, vocab_size) == wanted


def test_published_layer_ids_are_the_default_ones(tmp_path: Path) -> None:
    unsaid = DFLASH_35B | {"dflash_config": {"mask_token_id": 248070}, "num_hidden_layers": 5, "layer_types": None}
    config, _, _ = parse(fields(tmp_path, unsaid), None)
    assert config.target_layers == (1, 10, 19, 28, 37)


@pytest.mark.parametrize("whole", [True, False])
def test_mtp_of_35b_a3b(tmp_path: Path, whole: bool) -> None:
    published = {"model_type": "qwen3_5_moe", "text_config": TEXT_35B, "vision_config": {}} if whole else TEXT_35B
    config = parse_mtp(fields(tmp_path, published))
    with torch.device("meta"):
        found = of(MTP(config))
    mlp = "layers.0.mlp"
    wanted = {"fc.weight": [2048, 4096]} | layer("layers.0", (2048, 512, 16, 2, 256), gates=2)
    for name in ("gate", "up", "down"):
        wanted[f"{mlp}.shared_expert.{name}_proj.weight"] = wanted.pop(f"{mlp}.{name}_proj.weight")
    wanted |= {f"{name}.weight": [2048] for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    wanted |= {
        f"{mlp}.gate.weight": [256, 2048],
        f"{mlp}.experts.gate_up_proj": [256, 1024, 2048],
        f"{mlp}.experts.down_proj": [256, 2048, 512],
        f"{mlp}.shared_expert_gate.weight": [1, 2048],
    }
    assert found == wanted and len(found) == 19
    assert config.layer.experts == ExpertsConfig(256, 8, 512, normalize=True) and config.layer.rotary_dim == 64


@pytest.mark.parametrize("whole", [True, False])
def test_mtp_of_27b(tmp_path: Path, whole: bool) -> None:
    published = {"model_type": "qwen3_5", "text_config": TEXT_27B, "vision_config": {}} if whole else TEXT_27B
    config = parse_mtp(fields(tmp_path, published))
    with torch.device("meta"):
        found = of(MTP(config))
    wanted = {"fc.weight": [5120, 10240]} | layer("layers.0", (5120, 17408, 24, 4, 256), gates=2)
    wanted |= {f"{name}.weight": [5120] for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    assert found == wanted and len(found) == 15
    assert found["layers.0.self_attn.q_proj.weight"] == [12288, 5120]
    assert config.layer.rotary_dim == 64
