"""What a drafter's head makes of its slots while it trains, the data's own tokens before them, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.target import Target

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
"""DSpark's, as published."""
SELECTOR_WEIGHT = 1.0
"""Of the choice among the candidates, beside the cross-entropy over the vocabulary. Not tuned."""
BASE_WEIGHT = 0.5
"""Of the uncorrected logits' share in Domino's loss. Its authors' recipe lowers it from 1 to 0 while it trains; here it
is fixed."""


@dataclass(frozen=True)
class Slots:
    """The supervised slots of N blocks, n in each.

    `hidden[B, N, n, H]` of the drafter; `labels[B, N, n]`; `prefix[B, N, p + n - 1]`, the tokens from the anchor to the
    one before the last label, of which the first p come before the first label; `ahead[B, N, n, H]`, the target's state
    that predicts each label.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    prefix: torch.Tensor
    ahead: torch.Tensor

    @property
    def previous(self) -> torch.Tensor:
        """`[B, N, n]`, the token before each label."""
        return self.prefix[..., -self.labels.shape[-1] :]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Nats of each label."""
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(
        labels.shape
    )


def head_logits(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    """`[B, N, n, V]`: what each slot's token is drawn from."""
    heads = drafter.config.heads
    return (LOGITS[heads[0]] if heads else _plain)(drafter, target, slots)


def slot_losses(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    """`[B, N, n]`: the loss of each slot."""
    heads = drafter.config.heads
    if not heads:
        return cross_entropy(_plain(drafter, target, slots), slots.labels)
    return LOSSES[heads[0]](drafter, target, slots)


def _plain(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    return target.logits(slots.hidden)


def _selected(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    selector = drafter.candidate_selector
    unary = selector.unary(target.logits(slots.hidden))
    listed, ids = unary.topk(selector.config.top_k, dim=-1)
    scores = selector.scores(listed, slots.hidden, slots.previous, ids)
    return torch.full_like(unary, -torch.inf).scatter(-1, ids, scores.to(unary.dtype))


def _selector_loss(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    """Cross-entropy over the vocabulary, and over the candidates, the label in the last one's place where it is not
    among them."""
    selector, labels = drafter.candidate_selector, slots.labels[..., None]
    unary = selector.unary(target.logits(slots.hidden))
    ids = unary.topk(selector.config.top_k, dim=-1).indices
    missing = ~(ids == labels).any(dim=-1, keepdim=True)
    ids = torch.cat([ids[..., :-1], torch.where(missing, labels, ids[..., -1:])], dim=-1)
    scores = selector.scores(unary.gather(-1, ids), slots.hidden, slots.previous, ids)
    place = (ids == labels).int().argmax(dim=-1)
    return cross_entropy(unary, slots.labels) + SELECTOR_WEIGHT * cross_entropy(scores, place)


def _biased(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    logits = target.logits(slots.hidden)
    return logits + drafter.markov_head(slots.previous)[..., : logits.shape[-1]]


def _markov_loss(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    """Cross-entropy, distance to the target's own distribution, and the confidence against the chance of acceptance
    that this distance means."""
    logits = _biased(drafter, target, slots)
    wanted = target.logits(slots.ahead).float().softmax(-1)
    distance = (logits.float().softmax(-1) - wanted).abs().sum(-1)
    loss = CE_WEIGHT * cross_entropy(logits, slots.labels) + L1_WEIGHT * distance
    markov = drafter.config.markov
    if markov is not None and markov.confidence:
        chance = (1 - distance.detach() / 2).clamp(0, 1)
        said = drafter.confidence_head(slots.hidden, drafter.markov_head.markov_w1(slots.previous))
        loss = loss + CONFIDENCE_WEIGHT * functional.binary_cross_entropy_with_logits(said, chance, reduction="none")
    return loss


def _corrected(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    head, logits = drafter.logit_head, target.logits(slots.hidden)
    count = slots.labels.shape[-1]
    embedded = target.embed_tokens(slots.prefix.flatten(0, 1))  # [B * N, p + n - 1, H]
    state, states = head.start(embedded[:, 0]), []
    for column in embedded.unbind(1):
        state = head.prefix_gru(column, state)
        states.append(state)
    seen = torch.stack(states[-count:], dim=1).view(*slots.labels.shape, -1)
    # candidate i of the round follows i + 1 tokens of the prefix
    pure = max(0, head.config.pure - (slots.prefix.shape[-1] - count))
    bias = head(slots.hidden, seen)[..., : logits.shape[-1]]
    return torch.cat([logits[..., :pure, :], (logits + bias)[..., pure:, :]], dim=-2)


def _recurrent_loss(drafter: Drafter, target: Target, slots: Slots) -> torch.Tensor:
    """Cross-entropy of the corrected and of the plain logits."""
    corrected = cross_entropy(_corrected(drafter, target, slots), slots.labels)
    plain = cross_entropy(_plain(drafter, target, slots), slots.labels)
    return (1 - BASE_WEIGHT) * corrected + BASE_WEIGHT * plain


_Head = Callable[[Drafter, Target, Slots], torch.Tensor]
LOGITS: dict[str, _Head] = {"selector": _selected, "markov": _biased, "recurrent": _corrected}
LOSSES: dict[str, _Head] = {"selector": _selector_loss, "markov": _markov_loss, "recurrent": _recurrent_loss}
"""By the part of the drafter's configuration."""
