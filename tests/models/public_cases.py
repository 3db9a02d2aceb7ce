"""Random configurations of the public formats and our models over paged caches, for comparison with their makers'."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from dmtp_kernels.decode.caches import PagedCache, slots_of
from dmtp_kernels.decode.forward import causal_attend, drafter_attend
from dmtp_kernels.decode.work import Rows
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target, TargetOutput

PAGE = 4


def layer_case(draw: random.Random) -> dict[str, Any]:
    """Sizes of a layer, as a configuration names them."""
    kv_heads = draw.choice([1, 2, 3])
    return {
        "hidden_size": draw.choice([16, 24, 40]),
        "intermediate_size": draw.choice([24, 56]),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice([1, 2, 4]),
        "head_dim": draw.choice([8, 12, 16]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([10000.0, 1e6, 1e7])},
    }


def drafter_case(draw: random.Random) -> dict[str, Any]:
    """Keys of a DFlash configuration: any mix of full and sliding layers, every rule of causality."""
    layers, total, vocab_size = draw.choice([1, 2, 3, 5]), draw.choice([6, 9, 12]), draw.choice([40, 67])
    kinds = draw.choice(
        [
            None,
            ["full_attention"] * layers,
            ["sliding_attention"] * layers,
            [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)],
        ]
    )
    section: dict[str, Any] = {"mask_token_id": draw.randrange(vocab_size)}
    if draw.random() < 0.7:
        count = draw.choice([1, 2, 4])
        section["target_layer_ids"] = sorted(draw.sample(range(total - 1), count))
    case = {
        **layer_case(draw),
        "num_hidden_layers": layers,
        "num_target_layers": total,
        "vocab_size": vocab_size,
        "dflash_config": section,
        "is_causal": draw.choice([None, None, False, True]),
        "max_position_embeddings": 256,
    }
    (case if draw.random() < 0.5 else section)["block_size"] = draw.choice([2, 4, 7, 8, 16])
    if kinds is None and draw.random() < 0.5:
        case |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": draw.randrange(layers + 1)}
    elif kinds is not None:
        case["layer_types"] = kinds
        if "sliding_attention" in kinds:
            case |= {"use_sliding_window": True, "sliding_window": draw.choice([1, 3, 6, 20, 500])}
    return case


def randomise(module: nn.Module, seed: int) -> None:
    """Weights for which every part of the model matters, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1:
                tensor.copy_(0.7 + 0.3 * noise)
            else:
                tensor.copy_(noise if tensor.shape[-1] == 1 else noise * 1.5 / tensor.shape[-1] ** 0.5)


def filled_cache(layer_config: Any, layers: int, length: int, seed: int) -> tuple[PagedCache, torch.Tensor]:
    """An empty cache (NaN) and a table `[1, pages]` of shuffled pages for `length` rows and a block."""
    pages = (length + 64) // PAGE
    cache = PagedCache.create(layer_config, layers, pages, PAGE, torch.float32, torch.device("cpu"))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)) + 1
    return cache, order[None].to(torch.int32)


def put(cache: PagedCache, table: torch.Tensor, rows: Rows, start: int) -> None:
    """Store rows `[1, T, ...]` at positions from `start`."""
    count = rows.k[0].shape[1]
    slots = slots_of(table, torch.arange(start, start + count)[None], PAGE)[0]
    for layer in range(len(rows.k)):
        cache.flat_k[layer][slots] = rows.k[layer][0]
        cache.flat_v[layer][slots] = rows.v[layer][0]


@torch.no_grad()
def run_block(drafter: Drafter, features: torch.Tensor, embeds: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Hidden `[S, H]` of a block `embeds[S, H]` after context `features[T, F]`, committed in `chunks`."""
    config, length = drafter.config, features.shape[0]
    cache, table = filled_cache(config.layer, config.num_layers, length, seed=length)
    start = 0
    for count in chunks:
        positions = torch.arange(start, start + count)[None]
        pairs = drafter.context_keys_values(features[None, start : start + count], positions)
        put(cache, table, Rows([k for k, _ in pairs], [v for _, v in pairs]), start)
        start += count
    assert start == length
    attend = drafter_attend(config, cache, table, torch.tensor([length], dtype=torch.int32))
    return drafter(embeds[None], torch.arange(length, length + embeds.shape[0])[None], attend)[0]


@torch.no_grad()
def run_target(model: Target, ids: torch.Tensor, chunks: list[int], feature_layers: tuple[int, ...]) -> TargetOutput:
    """Target over `ids[n]` in `chunks`, each after the rows of those before."""
    cache, table = filled_cache(model.config.layer, model.config.num_layers, len(ids), seed=len(ids))
    outputs, start = [], 0
    for count in chunks:
        rows = Rows([], [])
        attend = causal_attend(cache, table, torch.tensor([start], dtype=torch.int32), rows)
        positions = torch.arange(start, start + count)[None]
        outputs.append(model(ids[None, start : start + count], positions, attend, feature_layers))
        put(cache, table, rows, start)
        start += count
    return TargetOutput(*(torch.cat(parts, dim=1)[0] for parts in zip(*outputs, strict=True)))


@torch.no_grad()
def run_mtp(model: MTP, embeds: torch.Tensor, hidden: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """MTP rows `[n, H]` in `chunks`, each after the rows of those before."""
    cache, table = filled_cache(model.config.layer, model.config.num_layers, len(embeds), seed=len(embeds))
    outputs, start = [], 0
    for count in chunks:
        rows, stop = Rows([], []), start + count
        attend = causal_attend(cache, table, torch.tensor([start], dtype=torch.int32), rows)
        outputs.append(
            model(embeds[None, start:stop], hidden[None, start:stop], torch.arange(start, stop)[None], attend)
        )
        put(cache, table, rows, start)
        start = stop
    return torch.cat(outputs, dim=1)[0]


def chunked(draw: random.Random, length: int) -> list[int]:
    """Sizes that add up to `length`."""
    sizes = []
    while length:
        sizes.append(draw.randint(1, length))
        length -= sizes[-1]
    return sizes


def worst(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest error relative to the largest value."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
