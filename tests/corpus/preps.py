"""T1 preparation: ties at the top, screens that decide nothing, hidden states that are no numbers, ids at the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, fold_fusion
from tests.corpus.entry import I32, I64, INF, NAN, Draws, Entry, edges, extreme, gaps, off

_Make = Callable[[Draws], tuple[Any, ...]]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
_ROWS, _PADDING, _MASK = 90, 5, 88


def _hidden(draw: Draws, batch: int, width: int, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of one kind each; most of them point at rows of the head that have twins."""
    x = draw.reals(batch, width, dtype=dtype)
    largest = torch.finfo(dtype).max
    odd: list[Any] = [0.0, -0.0, NAN, INF, largest, draw.pick(width, of=edges(dtype), dtype=dtype)]
    odd.append(draw.pick(width, of=(torch.finfo(dtype).smallest_normal, 0.0, -0.0), dtype=dtype))
    for b in range(batch):
        x[b] = weight[int(draw.whole(1, low=0, high=_ROWS - _PADDING))].to(dtype)
        if b % 2 and b // 2 < len(odd):
            x[b] = odd[b // 2]
    return gaps(x)


def _weight(draw: Draws, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Every row of the head twice or more, rows of zeros, and padding that would win."""
    weight = draw.reals(_ROWS, width, dtype=dtype, spread=24)
    twins = torch.tensor(draw.order(_ROWS - _PADDING))
    for one, other in twins.view(-1, 5)[:, :2].tolist():
        weight[other] = weight[one]
    weight[twins[:2]] = 0.0
    weight[-_PADDING:] = NAN
    weight[-1] = torch.finfo(dtype).max
    return gaps(weight)


def _fusion(draw: Draws, mode: str, width: int, hidden: int, dtype: torch.dtype, slots: str) -> Fusion:
    if mode == "none":
        return Fusion()
    reads = hidden if slots == "masks" else width + hidden

    def small(*shape: int) -> torch.Tensor:
        return gaps(draw.reals(*shape, dtype=dtype, spread=4) / 8)

    norms: dict[str, Any] = {
        "norm_m": small(hidden),
        "norm_e": None if slots == "masks" else small(width),
        "offset_m": 1.0,
    }
    if mode == "residual_low_rank":
        return Fusion(mode=mode, down=small(5, reads), up=small(width, 5), slots=slots, **norms)
    return Fusion(mode=mode, weight=small(width, reads), slots=slots, offset_e=1.0, **norms)


def _prep(
    batch: int, width: int, hidden: int, *, dtype: torch.dtype = BF16, format: str | None = "int8",
    mode: str = "residual", slots: str = "t1", anchors: int = 2, index: torch.dtype = I64, mapped: bool = False,
    fold: bool = False, start: int = 0, capacity: int | None = None, logit_dtype: str = "float32",
) -> _Make:  # fmt: skip
    def make(draw: Draws) -> tuple[Any, ...]:
        table = draw.reals(_ROWS, width, dtype=dtype)
        table[:8] = draw.pick(8, width, of=(0.0, -0.0, 1.0), dtype=dtype)
        table = gaps(table)
        weight = _weight(draw, hidden, dtype)
        h = _hidden(draw, batch, hidden, weight, dtype)
        anchor = off(draw.pick(batch, of=(*range(12), *range(60, _ROWS + 1), *extreme(index)), dtype=index))
        head = None
        if format is not None:
            ids = torch.where(torch.arange(_ROWS) % 5 == 2, -1, torch.tensor(draw.order(_ROWS))) if mapped else None
            more: dict[str, Any] = {"id_map": ids, "id_map_mode": "absolute"} if mapped else {}
            head = pack_lm_head(weight, format=format, num_valid=_ROWS - _PADDING, capacity=capacity, **more)
        fusion = _fusion(draw, mode, width, hidden, dtype, slots)
        given = off(draw.pick(batch, of=(*range(_ROWS), *extreme(index)), dtype=index)) if head is None else None
        scalars = (head or LMHead(table, "dense", 0, 1, bound=table.new_zeros(_ROWS, dtype=F32))).args()[7:]
        return (
            anchor, h, table[start:], None, given,
            gaps(draw.reals(width, dtype=dtype)) if slots == "masks" else None,
            fold_fusion(table[start:], fusion) if fold else None,
            *((None,) * 7 if head is None else head.tensors()), *fusion.tensors(), *scalars, *fusion.args()[5:],
            anchors, _MASK, 3, 1.0, start, _ROWS, logit_dtype,
        )  # fmt: skip

    return make


_OP = "fused_t1_prep"

ENTRIES = (
    Entry(_OP, "int8", "ties, hidden states that are no numbers, padding that would win", _prep(24, 24, 40)),
    Entry(
        _OP,
        "dense",
        "fp32, int32, the plain block",
        _prep(20, 19, 33, dtype=F32, format="dense", mode="none", index=I32),
    ),
    Entry(_OP, "crowded", "more survivors than the list holds", _prep(17, 24, 32, dtype=F16, capacity=2)),
    Entry(_OP, "rounded", "logits rounded to bf16: many more ties", _prep(18, 24, 40, logit_dtype="bfloat16")),
    Entry(
        _OP,
        "mapped",
        "a map of tokens, some of which no row has",
        _prep(18, 24, 40, mode="residual_low_rank", mapped=True),
    ),
    Entry(
        _OP,
        "grouped",
        "codes of four bits, decided by the full scan",
        _prep(16, 24, 64, format="int4_g32", mode="replace", anchors=1),
    ),
    Entry(_OP, "given", "T1 given: ids at the edges, a shard of the table", _prep(30, 24, 40, format=None, start=40)),
    Entry(_OP, "masks", "a residual at the masks, a mask embedding", _prep(20, 24, 40, slots="masks", dtype=F32)),
    Entry(_OP, "folded", "the folded table", _prep(16, 24, 40, fold=True, dtype=F32)),
    Entry(_OP, "one", "one request", _prep(1, 24, 40)),
    Entry(_OP, "none", "no request", _prep(0, 24, 40)),
)
