"""T1 preparation with the vocabulary head cut over the ranks of a process group: one collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from dmtp_kernels import backends
from dmtp_kernels.ops._checks import check_instance, check_whole
from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.lm_head import UNCERTIFIED, LMHead, decode_key
from dmtp_kernels.ops.lm_head.op import LM_HEAD_SELECT
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.ops.t1_prep.fusion import Fusion
from dmtp_kernels.ops.t1_prep.op import FUSED_T1_PREP, check_types

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fused_t1_prep_sharded(
    anchor_ids: torch.Tensor,
    h_mtp: torch.Tensor,
    head: LMHead,
    embedding: torch.Tensor,
    fusion: Fusion,
    *,
    mask_id: int,
    group: Any = None,
    reduce_blocks: bool = False,
    anchors: int = 2,
    num_masks: int = 6,
    mask_embed: torch.Tensor | None = None,
    embed_scale: float = 1.0,
    fusion_hidden: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    embedding_start: int = 0,
    num_embeddings: int | None = None,
    logit_dtype: str = "float32",
) -> Outputs:
    """`fused_t1_prep` on every rank of `group`, with this rank's shard of the head: the same T1 everywhere.

    Each rank selects on its shard, one MAX all-reduce of `[2, B]` int64 (keys, status words) decides, each rank
    prepares its block. What every rank must pass alike is B, in every call: there is no collective inside a branch on
    data. Every argument is checked before the collective; a rank that raises leaves the others waiting until the
    group's timeout.

    Args:
        head: this rank's rows, with its `id_offset`, or an `absolute` id map (mapped rows may lie on any rank).
        group: a `torch.distributed` process group, None for the default one.
        reduce_blocks: for tables cut into disjoint shards: a second all-reduce gives every rank the whole block and
            T1's owner's `certified`. Without it the caller adds the ranks' blocks, zero where a rank does not own the
            token.
        The others are those of `fused_t1_prep`, per rank.

    Returns:
        As `fused_t1_prep`; with a whole table on each rank, and with `reduce_blocks`, the same bits on every rank.
        `certified` also says that no rank's answer is unproved: the greatest key proves nothing about a rank whose
        screen may have missed a greater one. With a shard of the table and without `reduce_blocks`, `certified` counts
        on T1's owner alone, which is the one that norms T1's embedding.

    Raises:
        ValueError, TypeError: as `fused_t1_prep`; `reduce_blocks` with a whole table on each of several ranks.
    """
    check_instance("head", head, LMHead)
    check_instance("fusion", fusion, Fusion)
    check_instance("embedding", embedding, torch.Tensor)
    check_whole("embedding_start", embedding_start)
    rows = embedding.shape[0]
    values: list[Any] = [anchor_ids, h_mtp, embedding, fusion_hidden, None, mask_embed, folded]
    values += [*head.tensors(), *fusion.tensors(), *head.scalars().values(), *fusion.scalars().values()]
    values += [anchors, mask_id, num_masks, embed_scale, embedding_start]
    values += [embedding_start + rows if num_embeddings is None else num_embeddings, logit_dtype]
    args = PrepArgs(*values)
    check_types(args)
    FUSED_T1_PREP.check(*args)
    if reduce_blocks and rows == args.num_embeddings and distributed.get_world_size(group) > 1:
        raise ValueError(f"reduce_blocks: is True, must be False with all {rows} rows of the table on each rank")
    if anchor_ids.shape[0] == 0:
        return _prepare(args, anchor_ids, None)
    keys, status = _select(args, head, group)
    outputs = _prepare(args, keys, status)
    return _reduced(args, outputs, group) if reduce_blocks else outputs


def _select(args: PrepArgs, head: LMHead, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[B]` and status `[B]` (int32) after the maximum over the ranks."""
    batch = args.anchor_ids.shape[0]
    words = workspace("t1_prep_words", args.h_mtp.device, 16 * batch)[: 16 * batch].view(torch.int64).view(2, batch)
    # the status in the upper half of its word: whatever lies in the lower one, the maximum has UNCERTIFIED, the highest
    # bit, when any rank has it
    status = words[1].view(torch.int32)[1::2]
    LM_HEAD_SELECT.out(
        args.h_mtp,
        *head.tensors(),
        **head.scalars(),
        k=1,
        logit_dtype=args.logit_dtype,
        key=words[0][:, None],
        status=status,
    )
    distributed.all_reduce(words, distributed.ReduceOp.MAX, group)
    return words[0], status


def _prepare(args: PrepArgs, keys: torch.Tensor, status: torch.Tensor | None) -> Outputs:
    device, batch = args.anchor_ids.device, args.anchor_ids.shape[0]
    if status is not None and backends.choose("fused_t1_prep", device) == "triton":
        from dmtp_kernels.ops.t1_prep import launch

        slots, width = args.anchors + args.num_masks, args.embedding.shape[1]
        outputs = (
            keys.new_empty(batch),
            keys.new_empty(batch, slots),
            args.embedding.new_empty(batch, slots, width),
            keys.new_empty(batch, dtype=torch.bool),
        )
        if launch.in_kernels(args, outputs[2]):
            launch.tail(args, launch.T1Source(keys, status), *outputs)
            return outputs
    token = keys if status is None else decode_key(keys)[0]
    given = args._replace(t1_override=token)._asdict()
    arguments = FUSED_T1_PREP.functional._schema.arguments
    positional = [given.pop(a.name) for a in arguments if not a.kwarg_only]
    t1, ids, block, certified = FUSED_T1_PREP.call(*positional, **given)
    if status is not None:
        certified &= status < UNCERTIFIED
    return t1, ids, block, certified


def _reduced(args: PrepArgs, outputs: Outputs, group: Any) -> Outputs:
    """The whole block, and the flag of T1's owner, on every rank.

    Bytes are added, not numbers: at most one rank has a byte that is not zero, so -0.0 and NaN keep their bits.
    """
    t1, ids, block, certified = outputs
    local = t1 - args.embedding_start
    certified &= (local >= 0) & (local < args.embedding.shape[0])
    parts = (block.reshape(-1).view(torch.uint8), certified.view(torch.uint8))
    packed = torch.cat(parts)
    distributed.all_reduce(packed, distributed.ReduceOp.SUM, group)
    block.view(-1).view(torch.uint8).copy_(packed[: parts[0].numel()])
    certified.copy_(packed[parts[0].numel() :].view(torch.bool))
    return t1, ids, block, certified
