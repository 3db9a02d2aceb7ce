"""What the stages of one round leave for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from dmtp_kernels.ops.accept import Acceptance

_T = TypeVar("_T")


class Rows(NamedTuple):
    """New K and V rows `[B, T, Hkv, D]` of every layer, not yet in any cache."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]


class TargetPass(NamedTuple):
    """`hidden[B, T, H]` after the final norm, `features[B, T, F]` for the drafter, and the new rows."""

    hidden: torch.Tensor
    features: torch.Tensor
    rows: Rows


class MTPPass(NamedTuple):
    """`hidden[B, T, H]`, each row's prediction state, and the new rows."""

    hidden: torch.Tensor
    rows: Rows


@dataclass
class Work:
    """Tensors that one stage writes and later stages of the same round read; B rows, R verify rows, K candidates.

    A captured stage writes the tensors it wrote when it was captured: who captures keeps this object, so that no other
    graph of the pool gets their memory. None: the method has no such thing, or no round ran yet.
    """

    block_ids: torch.Tensor | None = None  # [B, S]
    block_embeds: torch.Tensor | None = None  # [B, S, H]
    block_positions: torch.Tensor | None = None  # [B, S]
    block_hidden: torch.Tensor | None = None  # [B, S, H]
    drafted: list[torch.Tensor] = field(default_factory=list)  # [B, n] each: the candidates so far
    probabilities: list[torch.Tensor] = field(default_factory=list)  # [B, n, V] each: what they were drawn from
    draft_ids: torch.Tensor | None = None  # [B, K, N], where all were drawn from shortlists: probabilities are of these
    num_candidates: torch.Tensor | None = None  # [B], where the drafter's confidence cuts the row's own limit
    chain: torch.Tensor | None = None  # [B, n - 1], T2..Tn of the MTP module, where it proposes several
    chain_probabilities: list[torch.Tensor] = field(default_factory=list)
    candidates: torch.Tensor | None = None  # [B, R]: A, T1..TK, padding
    verified: TargetPass | None = None
    logits: torch.Tensor | None = None  # [B, R, V] of the target, where acceptance looks at them
    target_tokens: torch.Tensor | None = None  # [B, R], where it looks at tokens
    accepted: Acceptance | None = None
    advanced: MTPPass | None = None


def left(value: _T | None) -> _T:
    """`value`, which an earlier stage must have left."""
    assert value is not None
    return value
