"""T1 preparation on the compiled CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.t1_prep import reference
from dmtp_kernels.ops.t1_prep.args import PrepArgs

_INPUTS = len(PrepArgs._fields)


def fused_t1_prep(*values: Any) -> None:
    """As `reference.fused_t1_prep`; float64 inputs go there."""
    args = PrepArgs(*values[:_INPUTS])
    t1, block_ids, block_embeds, certified = values[_INPUTS:]
    token, status = (args.t1_override, None) if args.t1_override is not None else _select(args)
    done = backends.compiled().t1_prep(
        args.anchor_ids,
        token,
        status,
        args.hidden(),
        args.embedding,
        args.mask_embed,
        args.folded,
        args.fusion_weight if args.fusion_down is None else args.fusion_down,
        args.fusion_up,
        args.norm_e,
        args.norm_m,
        args.fusion_mode,
        args.fusion_slots == "masks",
        args.eps_e,
        args.eps_m,
        args.offset_e,
        args.offset_m,
        args.anchors,
        args.num_masks,
        args.mask_id,
        args.embed_scale,
        args.embedding_start,
        args.num_embeddings,
        t1,
        block_ids,
        block_embeds,
        certified,
    )
    if not done:
        reference.fused_t1_prep(*values)


def _select(args: PrepArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[B, 1]` and status `[B]` of the head."""
    head = args.head()
    assert head is not None
    batch = args.h_mtp.shape[0]
    scratch = workspace("t1_prep_selected", args.h_mtp.device, 12 * batch)
    key = scratch[: 8 * batch].view(torch.int64).view(batch, 1)
    status = scratch[8 * batch : 12 * batch].view(torch.int32)
    backends.implementation("lm_head_select", args.h_mtp.device)(args.h_mtp, *head, 1, args.logit_dtype, key, status)
    return key, status
