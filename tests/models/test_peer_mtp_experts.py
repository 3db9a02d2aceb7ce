"""Our MTP module with experts against one put together from transformers' Qwen3.5-MoE and Qwen3-Next layers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dmtp_kernels.models.experts import RoutedMLP
from dmtp_kernels.models.formats import read_mtp
from dmtp_kernels.models.formats.experts import split_experts
from tests.models.peer_cases import peer_mtp
from tests.models.public_cases import chunked, layer_case, randomise, run_mtp, worst

moe: Any = pytest.importorskip(
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", reason="transformers is not installed (make test-peer)"
)
following: Any = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


def save(directory: Path, draw: random.Random, seed: int) -> Any:
    """The peer's module with random weights, its experts stacked or one by one, beside a tensor of the target."""
    newer = draw.random() < 0.6
    case = layer_case(draw)
    del case["intermediate_size"]
    case["head_dim"] = draw.choice([8, 16, 32])
    case["rope_parameters"]["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0])
    if newer:
        case["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    count = draw.choice([1, 2, 5, 16, 40])
    case |= {
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, min(count, 8)),
        "moe_intermediate_size": draw.choice([4, 12, 20]),
        "shared_expert_intermediate_size": draw.choice([8, 24]),
    }
    if not newer:
        case |= {"norm_topk_prob": draw.random() < 0.5, "intermediate_size": 28}
    layers = draw.choice([1, 1, 2])
    source, name = (moe, "Qwen3_5Moe") if newer else (following, "Qwen3Next")
    config = getattr(source, f"{name}TextConfig" if newer else f"{name}Config")(
        **case, num_hidden_layers=layers, layer_types=["full_attention"] * layers, vocab_size=40
    )
    config._attn_implementation = config._experts_implementation = "eager"
    module = peer_mtp(source, name, config)
    randomise(module, seed)
    tensors = {f"mtp.{key}": tensor.detach().clone() for key, tensor in module.state_dict().items()}
    if draw.random() < 0.5:
        tensors = split_experts(tensors)
    save_file(tensors | {"model.language_model.norm.weight": torch.zeros(3)}, directory / "model.safetensors")
    text = case | {"model_type": "qwen3_5_moe_text" if newer else "qwen3_next", "num_hidden_layers": 40}
    if layers > 1 or newer:
        text["mtp_num_hidden_layers" if newer else "num_nextn_predict_layers"] = layers
    whole = {"model_type": "qwen3_5_moe", "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole if newer and draw.random() < 0.5 else text))
    return module


@pytest.mark.parametrize("seed", range(60))
@torch.no_grad()
def test_hidden_with_a_history(tmp_path: Path, seed: int) -> None:
    draw = random.Random(3000 + seed)
    module = save(tmp_path, draw, seed)
    ours = read_mtp(tmp_path)
    width, length = ours.config.layer.hidden_size, draw.choice([1, 2, 15, 50])
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(length, width, generator=generator)
    hidden = torch.randn(length, width, generator=generator)
    theirs = module(embeds, hidden)
    found = run_mtp(ours, embeds, hidden, chunked(draw, length))
    assert worst(found, theirs) < 1e-4
    head = torch.randn(40, width, generator=generator)
    assert torch.equal((found @ head.T).argmax(-1), (theirs @ head.T).argmax(-1))
    for layer, other in zip(ours.layers, module.layers, strict=True):
        mlp = layer.mlp
        assert isinstance(mlp, RoutedMLP)
        (weights, chosen), (_, their_weights, theirs_chosen) = mlp.route(embeds), other.mlp.gate(embeds)
        assert torch.equal(chosen, theirs_chosen) and worst(weights, their_weights) < 1e-5
        assert worst(mlp.experts.in_blocks(embeds, chosen), mlp.experts.by_expert(embeds, chosen)) < 1e-5
    # and it is this checkpoint that decides: embedding and hidden are not interchangeable
    assert worst(run_mtp(ours, hidden, embeds, [length]), theirs) > 1e-2
