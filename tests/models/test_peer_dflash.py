"""Our drafter against the DFlash authors' own model on the same checkpoint files: hidden states and greedy tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels.models.formats import read_dflash
from tests.models.public_cases import chunked, drafter_case, randomise, run_block, worst

peer: Any = pytest.importorskip("dflash.model", reason="the peer is not installed (make test-peer)")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed (make test-peer)")


def save(directory: Path, case: dict[str, Any], seed: int, kind: str = "DFlashDraftModel") -> Any:
    """The peer's model with random weights, saved by the peer and loaded by the peer."""
    model = getattr(peer, kind)(transformers.Qwen3Config(**case))
    randomise(model, seed)
    model.save_pretrained(directory)
    loaded, report = getattr(peer, kind).from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return loaded.eval()


@torch.no_grad()
def peer_block(model: Any, features: torch.Tensor, embeds: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """The peer's hidden of a block; context rows come in `chunks`, the block being drafted anew after each and cut
    off again, as its own generation does."""
    cache, start = peer._make_cache(model.config), 0
    for count in chunks:
        stop = start + count
        hidden = model(
            target_hidden=features[None, start:stop],
            noise_embedding=embeds[None],
            position_ids=torch.arange(start, stop + embeds.shape[0])[None],
            past_key_values=cache,
            use_cache=True,
        )
        peer._crop_to(cache, stop)
        start = stop
    return hidden[0]


@pytest.mark.parametrize("seed", range(64))
def test_hidden_and_tokens_of_a_block(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    case = drafter_case(draw)
    model = save(tmp_path, case, seed)
    ours = read_dflash(tmp_path).drafter
    config = ours.config
    assert list(config.target_layers) == list(model.target_layer_ids)
    assert (config.block_size, config.mask_token_id) == (model.block_size, model.mask_token_id)

    length = draw.choice([1, 2, 9, 30, 70])
    chunks = chunked(draw, length)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, config.context_size, generator=generator)
    table = torch.randn(case["vocab_size"], case["hidden_size"], generator=generator)
    ids = torch.full((draw.randint(2, model.block_size),), model.mask_token_id)
    ids[0] = draw.randrange(case["vocab_size"])

    theirs = peer_block(model, features, table[ids], chunks)
    found = run_block(ours, features, table[ids], chunks)
    assert worst(found, theirs) < 1e-4
    assert torch.equal((found @ table.T).argmax(-1), (theirs @ table.T).argmax(-1))


def test_a_wrong_window_is_seen(tmp_path: Path) -> None:
    # the comparison above can fail: the same weights under a window one longer
    case = drafter_case(random.Random(3)) | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True,
        "sliding_window": 6, "is_causal": False,
    }  # fmt: skip
    case["dflash_config"] |= {"block_size": 8, "target_layer_ids": [1, 3]}
    case.pop("block_size", None)
    model = save(tmp_path, case, 3)
    features = torch.randn(30, 2 * case["hidden_size"], generator=torch.Generator().manual_seed(0))
    embeds = torch.randn(8, case["hidden_size"], generator=torch.Generator().manual_seed(1))
    theirs = peer_block(model, features, embeds, [30])
    assert worst(run_block(read_dflash(tmp_path).drafter, features, embeds, [30]), theirs) < 1e-4
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"sliding_window": 7}, {"is_causal": True}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert worst(run_block(read_dflash(tmp_path).drafter, features, embeds, [30]), theirs) > 1e-2
