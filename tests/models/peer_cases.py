"""The DFlash authors' model on random weights; importing this needs no peer, calling it does."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.models.public_cases import randomise


def save(directory: Path, case: dict[str, Any], seed: int, kind: str = "DFlashDraftModel") -> Any:
    """The peer's model with random weights, saved by the peer and loaded by the peer."""
    peer, transformers = import_module("dflash.model"), import_module("transformers")
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
    peer = import_module("dflash.model")
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
