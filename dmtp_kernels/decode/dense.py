"""The models over a whole sequence at once, without caches, pages or ops: what the loop's state must equal."""

from __future__ import annotations

import torch

from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.layers import Attend
from dmtp_kernels.models.target import TargetOutput


def dense_attend(mask: torch.Tensor) -> Attend:
    """Attention under an explicit boolean `mask[T, T]` (True = visible), eager products in the rows' dtype."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[-2] // k.shape[-2]
        k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("...hqk,...khd->...qhd", weights, v)

    return attend


def causal_mask(length: int) -> torch.Tensor:
    """`[length, length]` lower triangle."""
    return torch.ones(length, length, dtype=torch.bool).tril()


@torch.no_grad()
def target_forward(checkpoint: Checkpoint, ids: torch.Tensor, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
    """Target over `ids[n]` at positions 0..n-1."""
    length = ids.shape[0]
    attend = dense_attend(causal_mask(length))
    return checkpoint.target(ids, torch.arange(length), attend, feature_layers)


@torch.no_grad()
def target_logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """`[n, num_valid]` logits after each of `ids[n]`."""
    return checkpoint.target.logits(target_forward(checkpoint, ids).hidden)
