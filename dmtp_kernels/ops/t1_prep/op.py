"""Schema, argument checks and dispatch of T1 preparation."""

from __future__ import annotations

import math
from typing import Any

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_instance,
    check_part,
    check_range,
    check_real,
    check_same_device,
    check_tensor,
    check_whole,
)
from dmtp_kernels.ops.lm_head.head import HeadArgs, check_head
from dmtp_kernels.ops.lm_head.op import LOGIT_DTYPES
from dmtp_kernels.ops.t1_prep.args import SCHEMA, PrepArgs
from dmtp_kernels.ops.t1_prep.fusion import FusionArgs, check_fusion, check_mask_id

_OWN = PrepArgs._fields[: PrepArgs._fields.index("head_weight")]  # tensors that no head or fusion carries
_TENSORS = (
    *_OWN,
    *(f"head.{name}" for name in HeadArgs._fields[: HeadArgs._fields.index("format")]),
    *(f"fusion.{name}" for name in FusionArgs._fields[: FusionArgs._fields.index("mode")]),
)
_LIKE = {"B": "anchor_ids", "H": "head.weight", "E": "embedding", "Ve": "embedding"}


def check_types(args: PrepArgs) -> None:
    """Types of what the caller gives by itself, which the dispatcher would refuse without naming it."""
    for name, tensor in zip(_OWN, args, strict=False):
        if tensor is not None or name in ("anchor_ids", "h_mtp", "embedding"):
            check_instance(name, tensor, torch.Tensor)
    for name in ("anchors", "mask_id", "num_masks", "embedding_start", "num_embeddings"):
        check_whole(name, getattr(args, name))
    check_real("embed_scale", args.embed_scale)
    check_choice("logit_dtype", args.logit_dtype, LOGIT_DTYPES)


def _check(*values: Any) -> None:
    args = PrepArgs(*values)
    sizes: dict[str, int] = {}
    check_tensor("anchor_ids", args.anchor_ids, ["B"], INDEX_DTYPES, sizes)
    head = args.head()
    if head is not None:
        check_part("head", check_head, head, sizes)
    check_tensor("h_mtp", args.h_mtp, ["B", "H"], FLOAT_DTYPES, sizes, like=_LIKE)
    check_tensor("embedding", args.embedding, ["Ve", "E"], FLOAT_DTYPES, sizes)
    if args.fusion_hidden is not None:
        check_tensor("fusion_hidden", args.fusion_hidden, ["B", None], FLOAT_DTYPES, sizes, like=_LIKE)
    if args.t1_override is not None:
        check_tensor("t1_override", args.t1_override, ["B"], INDEX_DTYPES, sizes, like=_LIKE)
    if args.mask_embed is not None:
        check_tensor("mask_embed", args.mask_embed, ["E"], FLOAT_DTYPES, sizes, like=_LIKE)
    check_same_device("anchor_ids", args.anchor_ids.device, **dict(zip(_TENSORS, values, strict=False)))

    rows = sizes["Ve"]
    check_range("embedding: rows", rows, 1)
    check_range("embedding_start", args.embedding_start, 0)
    check_range("num_embeddings", args.num_embeddings, args.embedding_start + rows)
    if args.anchors not in (1, 2):
        raise ValueError(f"anchors: is {args.anchors}, must be 1 or 2")
    check_range("num_masks", args.num_masks, 0)
    check_mask_id(args.mask_id, args.num_embeddings)
    check_choice("logit_dtype", args.logit_dtype, LOGIT_DTYPES)
    if not math.isfinite(args.embed_scale):
        raise ValueError(f"embed_scale: is {args.embed_scale}, must be finite")
    _check_source(args, head)

    fusion = args.fusion()
    like = {"E": "embedding", "H": "h_mtp" if args.fusion_hidden is None else "fusion_hidden"}
    check_part("fusion", check_fusion, fusion, {"E": sizes["E"], "H": args.hidden().shape[1]}, like)
    if args.folded is not None:
        if fusion.norm_e is None:
            raise ValueError(f"folded: is given, mode {fusion.mode!r} reads no embedding stream that could be folded")
        check_tensor("folded", args.folded, ["Ve", "E"], FLOAT_DTYPES, sizes, like=_LIKE)


def _check_source(args: PrepArgs, head: HeadArgs | None) -> None:
    if head is None:
        if args.t1_override is None:
            raise ValueError("head: is None, must be given unless t1_override supplies T1")
        return
    if head.id_map is None and head.id_offset + head.num_valid > args.num_embeddings:
        raise ValueError(
            f"head: its real rows reach token id {head.id_offset + head.num_valid - 1}, must stay below "
            f"num_embeddings {args.num_embeddings}; give pack_lm_head the real num_valid"
        )


def _shapes(*values: Any) -> list[Shape]:
    args = PrepArgs(*values)
    batch, slots = args.anchor_ids.shape[0], args.anchors + args.num_masks
    return [
        ((batch,), torch.int64),
        ((batch, slots), torch.int64),
        ((batch, slots, args.embedding.shape[1]), args.embedding.dtype),
        ((batch,), torch.bool),
    ]


FUSED_T1_PREP = define_op(
    "fused_t1_prep",
    args=SCHEMA,
    outs=("t1", "block_ids", "block_embeds", "certified"),
    shapes=_shapes,
    check=_check,
    implementations={
        "triton": "dmtp_kernels.ops.t1_prep.launch:fused_t1_prep",
        "cuda": "dmtp_kernels.ops.t1_prep.cuda:fused_t1_prep",
        "cpu": "dmtp_kernels.ops.t1_prep.cpu:fused_t1_prep",
        "reference": "dmtp_kernels.ops.t1_prep.reference:fused_t1_prep",
    },
)
