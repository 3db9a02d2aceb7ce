"""What is minimised: the distance to the target's own likeliest tokens, over a shortlist of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.decode.method import Method
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target
from dmtp_kernels.training.attention import causal_attend, causal_bias
from dmtp_kernels.training.losses import BLOCK, GAMMA, Frozen, block_slots
from dmtp_kernels.training.smollm2.data import Batch


@dataclass(frozen=True)
class Shortlist:
    """The rows of the head that a step's loss runs over.

    `ids[n]`; `place[V]` is an id's row, -1 where it is not listed; `bias[n]` makes up for the tokens that were left
    out: those drawn at random stand for all of them.
    """

    ids: torch.Tensor
    place: torch.Tensor
    bias: torch.Tensor


def step_shortlist(
    common: torch.Tensor, labels: torch.Tensor, vocabulary: int, negatives: int, generator: torch.Generator
) -> Shortlist:
    """The `common` tokens, the batch's `labels`, and `negatives` others drawn at random."""
    listed = torch.zeros(vocabulary, dtype=torch.bool)
    listed[common] = True
    listed[labels.flatten()] = True
    known = listed.nonzero()[:, 0]
    others = (~listed).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:negatives]]
    ids = torch.cat([known, drawn])
    place = torch.full((vocabulary,), -1)
    place[ids] = torch.arange(len(ids))
    bias = torch.zeros(len(ids))
    bias[len(known) :] = torch.log(torch.tensor(len(others) / max(1, len(drawn))))
    return Shortlist(ids, place, bias)


def soft_loss(
    target: Target, hidden: torch.Tensor, soft_ids: torch.Tensor, soft_logits: torch.Tensor, listed: Shortlist
) -> torch.Tensor:
    """`[M]` cross-entropies in nats of states `hidden[M, H]` against the target's likeliest tokens `[M, SOFT]`, those
    that are not listed left out."""
    weight = target.lm_head.weight[listed.ids]
    logits = (hidden @ weight.T).float() + listed.bias
    place = listed.place[soft_ids]
    wanted = soft_logits.masked_fill(place < 0, float("-inf")).softmax(-1)
    return logits.logsumexp(-1) - (wanted * logits.gather(1, place.clamp(min=0))).sum(-1)


def answer_rows(batch: Batch) -> torch.Tensor:
    """`[B, T]`: rows p of MTP whose token p+2 is part of the answer, p+1 being a row that the target has run."""
    place = torch.arange(batch.ids.shape[1])
    return (place + 2 >= batch.answer[:, None]) & (place + 2 < batch.length[:, None])


def mtp_forward(target: Target, mtp: MTP, batch: Batch) -> torch.Tensor:
    """MTP's output `[B, T, H]`; row p has read the token p+1. Rows from the last token on are of no use."""
    size = batch.ids.shape[1]
    attend = causal_attend(causal_bias(size, batch.features.dtype))
    tokens = batch.ids.roll(-1, dims=1)
    return mtp(target.embed_tokens(tokens), target.norm(batch.hidden), torch.arange(size), attend)


def mtp_loss(target: Target, mtp: MTP, batch: Batch, listed: Shortlist) -> torch.Tensor:
    rows = answer_rows(batch)
    behind = rows.roll(1, dims=1)  # row p learns what the target made of token p+1
    hidden = mtp_forward(target, mtp, batch)[rows]
    return soft_loss(target, hidden, batch.soft_ids[behind], batch.soft_logits[behind], listed).mean()


def draw_anchors(batch: Batch, count: int, generator: torch.Generator) -> torch.Tensor:
    """`[B, count]` sorted anchors in the answers, each with the labels of a whole block behind it."""
    room = (batch.length - BLOCK - batch.answer + 1)[:, None]
    share = torch.rand((len(room), count), generator=generator)
    return (batch.answer[:, None] + (share * room).long()).sort(dim=1).values


def frozen(target: Target, mtp: MTP | None, batch: Batch) -> Frozen:
    """What the drafters train on; without MTP its stream is the target's."""
    hidden = target.norm(batch.hidden)
    with torch.no_grad():
        ahead = hidden if mtp is None else mtp_forward(target, mtp, batch)
    return Frozen(batch.ids, hidden, batch.features, ahead)


def block_loss(
    method: Method,
    drafter: Drafter,
    fusion: FusionModule | None,
    target: Target,
    batch: Batch,
    seen: Frozen,
    anchors: torch.Tensor,
    listed: Shortlist,
) -> torch.Tensor:
    """Position-decayed, weights normalised to one."""
    slots, first = block_slots(method, drafter, fusion, target, seen, anchors)
    rows = torch.arange(len(anchors))[:, None, None]
    before = anchors[..., None] + torch.arange(first - 1, BLOCK - 1)  # [B, N, n]
    losses = soft_loss(
        target,
        slots.hidden.flatten(0, 2),
        batch.soft_ids[rows, before].flatten(0, 2),
        batch.soft_logits[rows, before].flatten(0, 2),
        listed,
    )
    weight = torch.exp(-torch.arange(BLOCK - first) / GAMMA)
    return (losses.view(slots.labels.shape).mean((0, 1)) * (weight / weight.sum())).sum()
