"""From the MTP hidden state to the drafter's input: T1 selected, embedded, fused and placed in its block."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels._supports import takes_packed
from dmtp_kernels.ops._checks import check_instance, check_whole
from dmtp_kernels.ops.lm_head import LMHead
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.ops.t1_prep.fold import fold_fusion
from dmtp_kernels.ops.t1_prep.fusion import Fusion, check_mask_id
from dmtp_kernels.ops.t1_prep.op import FUSED_T1_PREP, check_types

__all__ = ["Fusion", "check_mask_id", "fold_fusion", "fused_t1_prep"]

_HEAD_TENSORS, _FUSION_TENSORS = 7, 5  # leading fields of HeadArgs and FusionArgs
_NO_HEAD = (*(None,) * _HEAD_TENSORS, "dense", 0, 0, "none", 1, True)


@takes_packed(LMHead, Fusion)
def fused_t1_prep(
    anchor_ids: torch.Tensor,
    h_mtp: torch.Tensor,
    head: LMHead | None,
    embedding: torch.Tensor,
    fusion: Fusion,
    *,
    mask_id: int,
    anchors: int = 2,
    num_masks: int = 6,
    mask_embed: torch.Tensor | None = None,
    embed_scale: float = 1.0,
    t1_override: torch.Tensor | None = None,
    fusion_hidden: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    embedding_start: int = 0,
    num_embeddings: int | None = None,
    logit_dtype: str = "float32",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select T1, look up the block's embeddings and fuse the MTP hidden into them.

    Args:
        anchor_ids: `[B]` int32/int64, the newest emitted token A. A row with a negative anchor is inert.
        h_mtp: `[B, H]`, the MTP output that predicted T1, in the form the head reads (the caller applies MTP's final
            norm or not); never one computed after consuming T1.
        head: this rank's head. None when `t1_override` supplies T1; a head given with it is checked but never read.
        embedding: `[Ve, E]` table; E need not equal H.
        fusion: what is added where, see `Fusion`. Each stream gets exactly one norm here.
        mask_id: id of the MASK slots, in `[0, num_embeddings)` also with `mask_embed`.
        anchors: 2 gives `[A, T1, MASK...]`, 1 gives `[T1, MASK...]`.
        num_masks: MASK slots.
        mask_embed: `[E]`, stands in for the table's row `mask_id`.
        embed_scale: factor on every embedding, `mask_embed` included; the product is rounded to the table's dtype.
        t1_override: `[B]` int32/int64, T1 decided elsewhere (sampling, training, a collective over vocabulary shards).
        fusion_hidden: `[B, Hf]`, the MTP hidden the fusion reads when it is not the one the head reads.
        folded: `[Ve, E]` from `fold_fusion`; replaces the embedding half of the fusion.
        embedding_start: token id of row 0 of `embedding` (a vocabulary shard). Slots whose token another rank owns are
            zero, their residual included, so the blocks of all ranks add up to the whole one.
        num_embeddings: rows of the whole table (default: `embedding_start + Ve`).
        logit_dtype: as `lm_head_select`.

    Returns:
        `t1 [B]` int64: the greedy token, -1 where there is none (inert row, no finite logit, id outside the table);
        `block_ids [B, S]` int64, S = anchors + num_masks: -1 in an inert row and where an id is missing or outside the
        table; `block_embeds [B, S, E]` in the table's dtype: zeros where the id is -1;
        `certified [B]` bool: T1 is a token, proved to be the head's exact greedy one or given by the caller, the anchor
        is in the table, and the mean square of every normed stream is finite.

    Statistics, norms and the projection run in fp32 (float64 for float64 inputs) without rounding in between; the sum
    is rounded once. An element whose residual is zero or not finite keeps the plain embedding's bits: a zero projection
    gives the plain block bit for bit. No row depends on another one.

    Raises:
        ValueError, TypeError: a shape, dtype, device or id range is wrong; the message names the argument.

    Source: section 3 of the DMTP description; the contract choices are in README.md beside this file.
    """
    check_instance("fusion", fusion, Fusion)
    check_instance("embedding", embedding, torch.Tensor)
    check_whole("embedding_start", embedding_start)
    if head is not None:
        check_instance("head", head, LMHead)
    source = _NO_HEAD if head is None else head.args()
    fused = fusion.args()
    values: tuple[Any, ...] = (
        anchor_ids,
        h_mtp,
        embedding,
        fusion_hidden,
        t1_override,
        mask_embed,
        folded,
        *source[:_HEAD_TENSORS],
        *fused[:_FUSION_TENSORS],
        *source[_HEAD_TENSORS:],
        *fused[_FUSION_TENSORS:],
        anchors,
        mask_id,
        num_masks,
        embed_scale,
        embedding_start,
        embedding_start + embedding.shape[0] if num_embeddings is None else num_embeddings,
        logit_dtype,
    )
    check_types(PrepArgs(*values))
    return FUSED_T1_PREP.call(*values)
