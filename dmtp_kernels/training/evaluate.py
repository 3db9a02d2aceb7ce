"""Held-out figures of a trio on real text: what each proposer says, with the text's own tokens before it."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.training.data import batch, seeded
from dmtp_kernels.training.heads import cross_entropy
from dmtp_kernels.training.losses import BLOCK, block_logits, frozen_forward, sample_anchors


@torch.no_grad()
def evaluate(
    checkpoint: Checkpoint, stream: torch.Tensor, *, rows: int, length: int = 256, anchors: int = 16
) -> dict[str, Any]:
    """Target nats per byte, and each proposer's agreement with the target's argmax on windows of `stream`.

    `agreement[method]` maps each candidate the drafter proposes to a share of the anchors, the same for all methods;
    `mtp` holds the T1 of the methods that take it from MTP, `mtp_agreement` the same over every row.
    """
    length = min(length, stream.numel() - 2)
    ids = batch(stream, rows, length + 1, 0)
    target = checkpoint.target
    assert checkpoint.mtp is not None
    layers = next(iter(checkpoint.drafters.values())).config.target_layers
    seen = frozen_forward(target, checkpoint.mtp, ids, layers)
    logits = target.logits(seen.hidden)
    choice = logits.argmax(-1)  # [B, T], entry p is the target's token for p+1
    ahead = target.logits(seen.ahead)
    places = sample_anchors(rows, min(anchors, length - 2 * BLOCK), length, seeded(0))
    agreed = ahead[:, :-1].argmax(-1) == choice[:, 1:]
    first_token = agreed.gather(1, places - 1).float().mean().item()
    agreement: dict[str, dict[str, float]] = {"mtp": {"T1": round(first_token, 4)}}
    for name, drafter in checkpoint.drafters.items():
        drafted, first = block_logits(METHODS[name], drafter, checkpoint.fusions.get(name), target, seen, places)
        wanted = places[..., None] + torch.arange(first, BLOCK) - 1
        right = drafted.argmax(-1) == choice.gather(1, wanted.flatten(1)).view(wanted.shape)
        shares = right.float().mean((0, 1)).tolist()
        agreement[name] = {f"T{first + i}": round(share, 4) for i, share in enumerate(shares)}
    return {
        "rows": rows,
        "target_nats_per_byte": round(cross_entropy(logits, ids[:, 1:]).mean().item(), 4),
        "mtp_nats_per_byte": round(cross_entropy(ahead[:, :-1], ids[:, 2:]).mean().item(), 4),
        "mtp_agreement": round(agreed.float().mean().item(), 4),
        "agreement": agreement,
    }
