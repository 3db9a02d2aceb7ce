"""What each stage minimises."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.decode.method import Method
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target
from dmtp_kernels.training.attention import block_attend, block_bias, causal_attend, causal_bias
from dmtp_kernels.training.heads import Slots, cross_entropy, head_logits, slot_losses

BLOCK = 8
GAMMA = 4.0
"""Decay of the block loss: the slot k places after the first supervised one weighs `exp(-k / GAMMA)`."""


def target_and_mtp(target: Target, mtp: MTP, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropies in nats of both models on `ids[B, T+2]`: the target predicts p+1, MTP row p predicts p+2."""
    length = ids.shape[1] - 2
    positions = torch.arange(length)
    attend = causal_attend(causal_bias(length, target.embed_tokens.weight.dtype))
    hidden = target(ids[:, :length], positions, attend).hidden
    ahead = mtp(target.embed_tokens(ids[:, 1 : length + 1]), hidden, positions, attend)
    return (
        cross_entropy(target.logits(hidden), ids[:, 1 : length + 1]).mean(),
        cross_entropy(target.logits(ahead), ids[:, 2:]).mean(),
    )


@dataclass(frozen=True)
class Frozen:
    """One batch seen by the frozen models: what every drafter trains on.

    `ids[B, T+1]`; the target's `hidden[B, T, H]` and `features[B, T, n*H]`; `ahead[B, T, H]`, the MTP output of each
    row (row p has read the tokens up to p+1), or the hidden again where MTP was not run.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    features: torch.Tensor
    ahead: torch.Tensor


@torch.no_grad()
def frozen_forward(
    target: Target, mtp: MTP, ids: torch.Tensor, layers: tuple[int, ...], with_mtp: bool = True
) -> Frozen:
    length = ids.shape[1] - 1
    positions = torch.arange(length)
    attend = causal_attend(causal_bias(length, target.embed_tokens.weight.dtype))
    out = target(ids[:, :length], positions, attend, layers)
    ahead = mtp(target.embed_tokens(ids[:, 1:]), out.hidden, positions, attend) if with_mtp else out.hidden
    return Frozen(ids, out.hidden, out.features, ahead)


def sample_anchors(rows: int, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`count` distinct sorted anchors `[rows, count]` with some context before and a whole block after them."""
    first, last = BLOCK, length - BLOCK
    order = torch.rand((rows, last - first), generator=generator).argsort(dim=1)
    return order[:, :count].sort(dim=1).values + first


def block_slots(
    method: Method, drafter: Drafter, fusion: FusionModule | None, target: Target, batch: Frozen, anchors: torch.Tensor
) -> tuple[Slots, int]:
    """The supervised slots of blocks at `anchors[B, N]`, and the first label's offset from the anchor.

    The T1 slot holds the data's own token a+1; the fused hidden is MTP's output of row a-1, the one that predicts it.
    """
    start = 0 if method.block_has_anchor else 1
    first = 1 if method.first == "drafter" else 2
    offsets = torch.arange(start, start + method.num_slots)
    positions = anchors[..., None] + offsets  # [B, N, S]
    rows = torch.arange(anchors.shape[0])[:, None]
    embeds = target.embed_tokens.weight[drafter.config.mask_token_id].expand(*positions.shape, -1)
    slots = list(embeds.unbind(2))
    if start == 0:
        slots[0] = target.embed_tokens(batch.ids[rows, anchors])
    if first == 2:
        token = target.embed_tokens(batch.ids[rows, anchors + 1])
        slots[1 - start] = token
        if fusion is not None:
            fused = fusion(token, batch.ahead[rows, anchors - 1])
            if fusion.mode == "mask_residual":
                slots[2 - start :] = [slot + fused for slot in slots[2 - start :]]
            else:
                slots[1 - start] = fused if fusion.mode == "replace" else token + fused
    streams = {"target": batch.features, "mtp": batch.ahead}
    features = torch.cat([streams[name] for name in method.context], dim=-1)
    if drafter.config.layer_masks:
        raise ValueError("drafter: has mask rules of single layers, training knows one window for all")
    context = drafter.context_keys_values(features, torch.arange(features.shape[1]))
    bias = block_bias(anchors, len(offsets), features.shape[1], drafter.config.window, features.dtype)
    hidden = drafter(torch.stack(slots, dim=2), positions, block_attend(context, bias))
    tokens = batch.ids[rows[..., None], anchors[..., None] + torch.arange(BLOCK)]  # [B, N, BLOCK]
    ahead = batch.hidden[rows[..., None], anchors[..., None] + torch.arange(first - 1, BLOCK - 1)]
    return Slots(hidden[:, :, method.predicting], tokens[..., first:], tokens[..., :-1], ahead), first


def block_logits(
    method: Method, drafter: Drafter, fusion: FusionModule | None, target: Target, batch: Frozen, anchors: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Logits `[B, N, n, V]` of the supervised slots at `anchors[B, N]`, and the first label's offset from the anchor; a
    head that looks at earlier tokens of the round sees the data's."""
    slots, first = block_slots(method, drafter, fusion, target, batch, anchors)
    return head_logits(drafter, target, slots), first


def block_loss(
    method: Method, drafter: Drafter, fusion: FusionModule | None, target: Target, batch: Frozen, anchors: torch.Tensor
) -> torch.Tensor:
    """The head's losses, position-decayed, weights normalised to one; without a head the cross-entropy in nats against
    the data's tokens."""
    slots, first = block_slots(method, drafter, fusion, target, batch, anchors)
    weight = torch.exp(-torch.arange(BLOCK - first) / GAMMA)
    return (slot_losses(drafter, target, slots).mean((0, 1)) * (weight / weight.sum())).sum()
