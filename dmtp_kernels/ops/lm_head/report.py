"""How well a screen does on the caller's own head and hidden states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dmtp_kernels.ops._checks import check_instance
from dmtp_kernels.ops.lm_head.head import LMHead
from dmtp_kernels.ops.lm_head.op import LM_HEAD_SCREEN, LM_HEAD_SELECT
from dmtp_kernels.ops.lm_head.pack import pack_lm_head

_BATCH = 256


@dataclass(frozen=True)
class HeadReport:
    """What the screen of `format` left over on `states` hidden states.

    `survivors` maps quantile to count (1.0 is the maximum); uncertified formats always keep `capacity`. `overflow` is
    the share of states that a full scan had to decide. `recall` is the share whose exact greedy token was on the list,
    `kept` the share whose answer is exact when nothing but the list decides (`fallback="none"`): the share of T1
    proposals that stay what the full head proposes. Certified formats keep all. `bytes_per_row` is what a screen reads
    of each row.
    """

    format: str
    states: int
    capacity: int
    survivors: dict[float, int]
    overflow: float
    recall: float
    kept: float = 1.0
    bytes_per_row: float = 0.0


def lm_head_report(
    head: LMHead, states: torch.Tensor, quantiles: tuple[float, ...] = (0.5, 0.9, 0.99, 1.0)
) -> HeadReport:
    """Run the screen of `head` over hidden states and compare with the exact answer. Offline: it reads results back.

    Args:
        head: from `pack_lm_head`, without an id map.
        states: `[m, H]` hidden states the head really sees; random ones say nothing about recall.
        quantiles: of the survivor counts, each in 0..1 (nearest rank).

    Raises:
        ValueError, TypeError: no states, or a head with an id map; the message names the argument.
    """
    check_instance("head", head, LMHead)
    check_instance("states", states, torch.Tensor)
    if states.dim() != 2 or states.shape[0] == 0:
        raise ValueError(f"states: shape is {tuple(states.shape)}, must be [m, {head.hidden_size}] with m at least 1")
    if head.id_map is not None:
        raise ValueError("head: has an id map, must be reported without one")
    exact = pack_lm_head(head.weight, format="dense", num_valid=head.num_valid, id_offset=head.id_offset)
    listed = head if head.certified else replace(head, full_scan=False)
    counts, hits, kept = [], 0, 0
    for part in states.split(_BATCH):
        ids, count, _ = LM_HEAD_SCREEN.call(part, *head.tensors(), **head.scalars())
        key, _ = LM_HEAD_SELECT.call(part, *exact.tensors(), **exact.scalars())
        answer, _ = LM_HEAD_SELECT.call(part, *listed.tensors(), **listed.scalars())
        token = (~key << 32) >> 32
        hits += int(((ids == token) & (token >= 0)).any(dim=1).sum())
        kept += int((answer == key).sum())
        counts.append(count)
    count = torch.cat(counts).sort().values
    last = count.shape[0] - 1
    return HeadReport(
        format=head.format,
        states=states.shape[0],
        capacity=head.capacity,
        survivors={q: int(count[round(q * last)]) for q in quantiles},
        overflow=float((count > head.capacity).double().mean()) if head.certified else 0.0,
        recall=hits / states.shape[0],
        kept=kept / states.shape[0],
        bytes_per_row=_screen_bytes(head) / max(1, head.weight.shape[0]),
    )


def _screen_bytes(head: LMHead) -> int:
    copy = [head.codes, head.up] if head.codes is not None or head.up is not None else [head.weight]
    return sum(t.numel() * t.element_size() for t in (*copy, head.scale, head.bound) if t is not None)
