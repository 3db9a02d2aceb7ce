"""Heads, and greedy tokens through them, shared by the tests of public bug reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.lm_head import LMHead, combine_keys, decode_key, lm_head_select, pack_lm_head, reference
from dmtp_kernels.ops.lm_head.formats import FORMATS

FORMAT_NAMES = tuple(FORMATS)
CERTIFIED = tuple(n for n in FORMATS if FORMATS[n].certified)


@pytest.fixture(autouse=True)
def always_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    # small heads would skip the screens under test
    monkeypatch.setattr(reference, "_DIRECT_ELEMENTS", 0)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def extras(name: str, width: int, rank: int = 16) -> dict[str, Any]:
    """What packing a head of `width` columns in this format needs besides the weight."""
    return {"calibration": random(64, width), "rank": rank} if FORMATS[name].factors else {}


def logits_head(logits: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `[V, n]` and hidden `[n, n]` whose canonical logits are exactly `logits [n, V]`."""
    return logits.T.to(dtype).contiguous(), torch.eye(logits.shape[0], dtype=dtype)


def select(
    h: torch.Tensor, w: torch.Tensor, *, ranks: int = 1, logit_dtype: str = "float32", **options: Any
) -> list[int]:
    """Greedy tokens of a head cut into `ranks` contiguous shards."""
    size = -(-w.shape[0] // ranks)
    valid = options.pop("num_valid", w.shape[0])
    parts = []
    for rank in range(ranks):
        shard = w[rank * size : (rank + 1) * size]
        count = max(0, min(shard.shape[0], valid - rank * size))
        head = pack_lm_head(shard, id_offset=rank * size, num_valid=count, **options)
        parts.append(lm_head_select(h, head, 1, logit_dtype)[0])
    return decode_key(combine_keys(parts))[0][:, 0].tolist()


def pack(weight: torch.Tensor, name: str, **options: Any) -> LMHead:
    if FORMATS[name].factors:
        generator = torch.Generator().manual_seed(1)
        options = {"calibration": torch.randn(32, weight.shape[1], generator=generator), "rank": 4, **options}
    return pack_lm_head(weight, format=name, **options)


def oracle(logits: torch.Tensor, num_valid: int, k: int = 1) -> list[list[int]]:
    """k best columns of each row: NaN never, ties to the lowest index, -1 when there are too few."""
    out = []
    for row in logits.double().numpy():
        ids = [i for i in range(num_valid) if not np.isnan(row[i])]
        ids.sort(key=lambda i: (-row[i], i))
        out.append((ids + [-1] * k)[:k])
    return out


def tokens(key: torch.Tensor) -> list[list[int]]:
    return decode_key(key)[0].tolist()
