"""The DFlash authors' model and transformers' layers on random weights; importing this needs no peer, calling it
does."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def peer_mtp(source: Any, name: str, config: Any) -> nn.Module:
    """An MTP module of the layers `<name>DecoderLayer` in `source`, a module of transformers.

    It has the layer and the norm but leaves the module itself to serving engines: [norm(embedding); norm(hidden)]
    through `fc`, full-attention layers, a norm.
    """
    norm, layer = getattr(source, f"{name}RMSNorm"), getattr(source, f"{name}DecoderLayer")
    rotary = getattr(source, f"{name}TextRotaryEmbedding", None) or getattr(source, f"{name}RotaryEmbedding")
    width, eps = config.hidden_size, config.rms_norm_eps

    class PeerMTP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pre_fc_norm_embedding = norm(width, eps)
            self.pre_fc_norm_hidden = norm(width, eps)
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.layers = nn.ModuleList(layer(config, layer_idx=i) for i in range(config.num_hidden_layers))
            self.norm = norm(width, eps)
            self.rotary = rotary(config)

        @torch.no_grad()
        def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            """Rows `[n, H]`."""
            x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1))[None]
            length = len(embeds)
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            rope = self.rotary(x, torch.arange(length)[None])
            for block in self.layers:
                x = block(x, position_embeddings=rope, attention_mask=mask)
            return self.norm(x)[0]

    return PeerMTP().eval()
