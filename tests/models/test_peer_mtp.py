"""Our MTP module against one put together from transformers' Qwen3.5 layers on the same `mtp.*` tensors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dmtp_kernels.models.formats import read_mtp
from tests.models.peer_cases import peer_mtp
from tests.models.public_cases import chunked, layer_case, randomise, run_mtp, worst

peer: Any = pytest.importorskip(
    "transformers.models.qwen3_5.modeling_qwen3_5", reason="transformers is not installed (make test-peer)"
)


def save(directory: Path, draw: random.Random, seed: int) -> Any:
    """The peer's module with random weights, written as Qwen3.5 checkpoints have it, beside a tensor of the target."""
    case = layer_case(draw)
    case["head_dim"] = draw.choice([8, 16, 32])
    case["rope_parameters"] |= {
        "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]), "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    }  # fmt: skip
    layers = draw.choice([1, 1, 2])
    config = peer.Qwen3_5TextConfig(
        **case, num_hidden_layers=layers, layer_types=["full_attention"] * layers, vocab_size=40
    )
    config._attn_implementation = "eager"
    module = peer_mtp(peer, "Qwen3_5", config)
    randomise(module, seed)
    tensors = {f"mtp.{name}": tensor.detach().clone() for name, tensor in module.state_dict().items()}
    save_file(tensors | {"model.language_model.norm.weight": torch.zeros(3)}, directory / "model.safetensors")
    text = case | {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": layers,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": 64,
    }
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole if draw.random() < 0.5 else text))
    return module


@pytest.mark.parametrize("seed", range(56))
def test_hidden_with_a_history(tmp_path: Path, seed: int) -> None:
    draw = random.Random(2000 + seed)
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
    # and it is this checkpoint that decides: embedding and hidden are not interchangeable
    assert worst(run_mtp(ours, hidden, embeds, [length]), theirs) > 1e-2
