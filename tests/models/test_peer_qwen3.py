"""Our Qwen3 target against transformers on the same checkpoint files, with a history."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels.models.formats import read_qwen3
from tests.models.public_cases import chunked, layer_case, randomise, run_target, worst

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed (make test-peer)")


def save(directory: Path, draw: random.Random, seed: int) -> Any:
    """transformers' Qwen3 with random weights, saved whole or in shards."""
    config = transformers.Qwen3Config(
        **layer_case(draw),
        num_hidden_layers=draw.choice([1, 2, 4]),
        vocab_size=draw.choice([40, 67]),
        tie_word_embeddings=draw.random() < 0.5,
        max_position_embeddings=256,
    )
    model = transformers.Qwen3ForCausalLM(config)
    randomise(model, seed)
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size=draw.choice(["5GB", "4KB"]))
    return transformers.Qwen3ForCausalLM.from_pretrained(directory).eval()


@pytest.mark.parametrize("seed", range(56))
def test_hidden_features_and_tokens(tmp_path: Path, seed: int) -> None:
    draw = random.Random(1000 + seed)
    model = save(tmp_path, draw, seed)
    ours = read_qwen3(tmp_path)
    assert (ours.lm_head.weight is ours.embed_tokens.weight) == model.config.tie_word_embeddings
    ids = torch.tensor([draw.randrange(model.config.vocab_size) for _ in range(draw.choice([1, 3, 20, 60]))])
    # the last state that transformers lists is the one after the final norm, so its layer is left out
    before_last = range(model.config.num_hidden_layers - 1)
    layers = tuple(draw.sample(before_last, min(2, len(before_last))))
    with torch.no_grad():
        theirs = model(ids[None], output_hidden_states=True)
    found = run_target(ours, ids, chunked(draw, len(ids)), layers)
    assert worst(found.hidden, theirs.hidden_states[-1][0]) < 1e-4
    logits = ours.logits(found.hidden)
    assert worst(logits, theirs.logits[0]) < 1e-4
    assert torch.equal(logits.argmax(-1), theirs.logits[0].argmax(-1))
    if layers:
        assert worst(found.features, torch.cat([theirs.hidden_states[i + 1][0] for i in layers], dim=-1)) < 1e-4
