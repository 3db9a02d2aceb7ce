"""Random requests as SGLang keeps them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass
class Batch:
    """Requests as SGLang keeps them, live rows among padded ones."""

    req_to_token: torch.Tensor  # [max_reqs + 1, max_len] int32
    req_pool_indices: torch.Tensor  # [bs] int64
    prefix_lens: torch.Tensor  # [bs] int64
    live: torch.Tensor  # [bs] bool
    num_slots: int


def draw_batch(draw: random.Random, *, page_size: int, block_size: int, window: int = 16) -> Batch:
    """Slots page by page, the dummy row and slot 0, stale tails of earlier requests, padded rows of length 0 and 1."""
    max_reqs, max_len = draw.randint(2, 7), page_size * draw.randint(-(-40 // page_size), -(-96 // page_size))
    pages_per = max_len // page_size
    pages = list(range(1, 1 + max_reqs * pages_per))
    draw.shuffle(pages)
    # every entry holds some slot: what lies past a request's length belonged to another one
    table = torch.tensor([0] * pages_per + pages).view(max_reqs + 1, pages_per, 1) * page_size + torch.arange(page_size)
    table[0] = 0
    edges = [1, 2, window - 1, window, window + 1, page_size, max_len - block_size]
    rows = []
    for pool in draw.sample(range(1, max_reqs + 1), draw.randint(1, max_reqs)):
        length = draw.choice([draw.choice(edges), draw.randint(1, max_len - block_size)])
        rows.append((pool, min(max(length, 1), max_len - block_size), True))
    rows += [(0, draw.choice([0, 1, 1]), False) for _ in range(draw.choice([0, 1, 3]))]
    pools, lens, live = zip(*rows, strict=True)
    slots = page_size * (1 + max_reqs * pages_per)
    return Batch(table.flatten(1).to(torch.int32), torch.tensor(pools), torch.tensor(lens), torch.tensor(live), slots)
