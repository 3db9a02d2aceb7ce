"""Heads, and greedy tokens through them, shared by the tests of public bug reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.lm_head import combine_keys, decode_key, lm_head_select, pack_lm_head, reference
from dmtp_kernels.ops.lm_head.formats import FORMATS

FORMAT_NAMES = tuple(FORMATS)


@pytest.fixture(autouse=True)
def always_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    # small heads would skip the screens under test
    monkeypatch.setattr(reference, "_DIRECT_ELEMENTS", 0)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
