"""Inputs and traffic of T1 preparation."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes
from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.ops.t1_prep.fold import fold_fusion
from dmtp_kernels.ops.t1_prep.fusion import Fusion

_ROWS = 300


def _fusion(
    generator: torch.Generator, mode: str, width: int, hidden: int, dtype: torch.dtype, alone: bool, rank: int
) -> Fusion:
    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to(dtype)

    if mode == "none":
        return Fusion()
    norms: dict[str, Any] = {"norm_m": random(hidden) + 1, "norm_e": None if alone else random(width) + 1}
    reads = hidden if alone else width + hidden
    if mode == "residual_low_rank":
        return Fusion(mode=mode, down=random(rank, reads), up=random(width, rank), **norms)
    return Fusion(mode=mode, weight=random(width, reads), offset_m=1.0, **norms)


def _head(generator: torch.Generator, format: str, rows: int, hidden: int, dtype: torch.dtype) -> LMHead:
    weight = torch.randn(rows, hidden, generator=generator).to(dtype)
    if format == "low_rank":
        states = torch.randn(64, hidden, generator=generator)
        return pack_lm_head(weight, format=format, calibration=states, rank=13, num_valid=rows - 3)
    if format == "mapped":
        # a reduced draft vocabulary: every second token
        id_map = torch.arange(rows) * 2
        return pack_lm_head(weight[: rows // 2], id_map=id_map[: rows // 2], id_map_mode="absolute")
    return pack_lm_head(weight, format=format, num_valid=rows - 3)


def _case(
    batch: int,
    width: int,
    hidden: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    format: str | None = "int8",
    mode: str = "residual",
    alone: bool = False,
    slots: str = "t1",
    anchors: int = 2,
    fold: bool = False,
    extras: bool = False,
    rank: int = 11,
    shard: int = 0,
    index: torch.dtype = torch.int64,
) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        embedding = torch.randn(_ROWS, width, generator=generator).to(dtype)
        anchor = torch.randint(-2, _ROWS, (batch,), generator=generator).to(index)
        h_mtp = torch.randn(batch, hidden, generator=generator).to(dtype)
        fused = torch.randn(batch, hidden + 5, generator=generator).to(dtype) if extras else None
        fusion = _fusion(generator, mode, width, hidden + 5 if extras else hidden, dtype, alone, rank)
        fusion = Fusion(**{**fusion.__dict__, "slots": slots})
        head = None if format is None else _head(generator, format, _ROWS, hidden, dtype)
        scalars = (
            head or LMHead(embedding, "dense", 0, 1, bound=embedding.new_zeros(_ROWS, dtype=torch.float32))
        ).args()
        return (
            anchor,
            h_mtp,
            embedding[shard:],
            fused,
            torch.randint(-1, _ROWS + 2, (batch,), generator=generator).to(index) if head is None else None,
            torch.randn(width, generator=generator).to(dtype) if extras else None,
            fold_fusion(embedding[shard:], fusion) if fold else None,
            *((None,) * 7 if head is None else head.tensors()),
            *fusion.tensors(),
            *scalars[7:],
            *fusion.args()[5:],
            anchors,
            _ROWS - 2,
            6,
            1.5 if extras else 1.0,
            shard,
            _ROWS,
            "float32",
        )

    return make


def _floor_bytes(*inputs: Any) -> int:
    args = PrepArgs(*inputs)
    batch, width = args.anchor_ids.shape[0], args.embedding.shape[1]
    item = args.embedding.element_size()
    slots = args.anchors + args.num_masks
    head, fusion = args.head(), args.fusion()
    screen = 0 if head is None else nbytes(head.codes, head.scale, head.bound, head.down, head.up, head.id_map)
    rows = batch * args.anchors * width * item + nbytes(args.mask_embed)
    weights = nbytes(fusion.weight, fusion.down, fusion.up, fusion.norm_e, fusion.norm_m)
    if args.folded is not None:
        weights = weights * args.hidden().shape[1] // (args.hidden().shape[1] + width)
    written = batch * (8 + 8 * slots + slots * width * item + 1)
    return nbytes(args.anchor_ids, args.h_mtp, args.fusion_hidden, args.t1_override) + screen + rows + weights + written


def _flops(*inputs: Any) -> int:
    args = PrepArgs(*inputs)
    batch, hidden = args.h_mtp.shape
    fusion = args.fusion()
    matrices = sum(m.numel() for m in (fusion.weight, fusion.down, fusion.up) if m is not None)
    return 2 * batch * (matrices + (0 if args.head() is None else args.num_valid * hidden))


PREP = Spec(
    op="fused_t1_prep",
    cases=(
        Case("dual", "the default method, some rows inert, E differs from H", _case(9, 48, 64)),
        Case("toy_fp32", "the decode loop's own sizes", _case(8, 192, 192, dtype=torch.float32)),
        Case(
            "replace",
            "one anchor, T1 replaced, int32 ids",
            _case(5, 40, 33, format="low_rank", mode="replace", anchors=1, index=torch.int32),
        ),
        Case(
            "masks",
            "residual at the masks, T1 given, every optional input",
            _case(5, 40, 48, format=None, alone=True, slots="masks", extras=True),
        ),
        Case(
            "folded",
            "folded table, low-rank residual, mapped head",
            _case(3, 40, 64, format="mapped", mode="residual_low_rank", fold=True),
        ),
        Case("plain", "no fusion, second shard of the table", _case(7, 40, 64, mode="none", shard=150)),
        Case("empty", "no live request", _case(0, 40, 64)),
    ),
    floor_bytes=_floor_bytes,
    flops=_flops,
    exact=False,
)

SPECS = (PREP,)


def _given(batch: int, width: int, **options: Any) -> Any:
    """T1 given, as after a collective over the head's shards; every request live."""
    make = _case(batch, width, width, format=None, **options)

    def valid(generator: torch.Generator) -> tuple[Any, ...]:
        args = PrepArgs(*make(generator))
        anchor, t1 = torch.arange(2 * batch).view(2, batch)
        return args._replace(anchor_ids=anchor, t1_override=t1)

    return valid


def _streams(args: PrepArgs) -> int:
    """What the fusion reads besides its matrices."""
    batch, width = args.anchor_ids.shape[0], args.embedding.shape[1]
    row = 0 if args.norm_e is None else batch * width * args.embedding.element_size()
    hidden = None if args.norm_m is None else args.hidden()
    return nbytes(args.anchor_ids, args.t1_override, hidden, args.norm_e, args.norm_m) + row


def _down_floor(*inputs: Any) -> int:
    args = PrepArgs(*inputs)
    assert args.fusion_down is not None
    batch, rank = args.anchor_ids.shape[0], args.fusion_down.shape[0]
    return _streams(args) + nbytes(args.fusion_down) + batch * (4 * rank + 4)


def _tail_floor(*inputs: Any) -> int:
    args = PrepArgs(*inputs)
    batch, width = args.anchor_ids.shape[0], args.embedding.shape[1]
    item, slots = args.embedding.element_size(), args.anchors + args.num_masks
    rows = (batch * args.anchors + 1) * width * item  # the mask's too
    written = batch * (8 + 8 * slots + slots * width * item + 1)
    if args.fusion_up is None:
        # the row of T1 is in the stream and in the sum
        again = 0 if args.norm_e is None else batch * width * item
        return _streams(args) - again + nbytes(args.fusion_weight) + rows + written
    low = batch * (4 * args.fusion_up.shape[1] + 4)
    return nbytes(args.anchor_ids, args.t1_override, args.fusion_up) + low + rows + written


def _traffic(name: str, why: str, make: Any, *, low_rank: bool = False) -> Traffic:
    kernels = {"t1_prep_tail_kernel": _tail_floor} | ({"t1_prep_down_kernel": _down_floor} if low_rank else {})
    # only the table grows with the vocabulary, and of it the requests' rows and the mask's are read
    return Traffic("fused_t1_prep", Case(name, why, make), kernels)


TRAFFIC = (
    _traffic("tail_2048_b8", "the widths of the 35B model, one full tile of requests", _given(8, 2048)),
    _traffic("tail_2048_b1", "one request", _given(1, 2048)),
    _traffic(
        "tail_2048_rank256",
        "low-rank residual, two launches",
        _given(8, 2048, mode="residual_low_rank", rank=256),
        low_rank=True,
    ),
    _traffic("tail_2048_plain", "no fusion", _given(8, 2048, mode="none")),
)
