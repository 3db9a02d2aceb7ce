"""Launches of the Triton kernels of T1 preparation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.t1_prep import kernels, reference
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.ops.t1_prep.config import REQUESTS, TailConfig, tail_config
from dmtp_kernels.ops.t1_prep.fusion import FusionArgs

_INPUTS = len(PrepArgs._fields)


class T1Source(NamedTuple):
    """Where T1 comes from: token ids, or keys with the status words of the head."""

    values: torch.Tensor  # [B] ids, or int64 keys
    status: torch.Tensor | None = None  # [B] int32, any stride

    def args(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """As the kernels take it."""
        return self.values, self.status, 0 if self.status is None else self.status.stride(0)


def fused_t1_prep(*values: Any) -> None:
    """The inputs of `PrepArgs`, then outputs t1 `[B]`, block_ids `[B, S]`, block_embeds `[B, S, E]`, certified."""
    args = PrepArgs(*values[:_INPUTS])
    outputs = values[_INPUTS:]
    if not in_kernels(args, outputs[2]):
        reference.fused_t1_prep(*values)
        return
    batch, device = args.anchor_ids.shape[0], args.anchor_ids.device
    if batch == 0:
        return
    if args.t1_override is not None:
        source = T1Source(args.t1_override)
    else:
        scratch = workspace("t1_prep_keys", device, 12 * batch)
        key, status = scratch[: 8 * batch].view(torch.int64), scratch[8 * batch : 12 * batch].view(torch.int32)
        head = args.head()
        assert head is not None
        select = backends.implementation("lm_head_select", device)
        select(args.h_mtp, *head, 1, args.logit_dtype, key[:, None], status)
        source = T1Source(key, status)
    tail(args, source, *outputs)


def in_kernels(args: PrepArgs, block_embeds: torch.Tensor) -> bool:
    """Whether the kernels take these tensors; float64, empty vectors and scattered outputs go to the reference."""
    fusion = args.fusion()
    read = [args.embedding, args.mask_embed, args.folded, *fusion[:5]]
    if fusion.mode != "none":
        read.append(args.hidden())
    width = args.embedding.shape[1]
    whole = width > 0 and args.hidden().shape[1] > 0 and (width == 1 or block_embeds.stride(2) == 1)
    return whole and all(t is None or t.dtype != torch.float64 for t in read)


def tail(
    args: PrepArgs,
    source: T1Source,
    t1: torch.Tensor,
    block_ids: torch.Tensor,
    block_embeds: torch.Tensor,
    certified: torch.Tensor,
) -> None:
    """Everything after the selection: one launch, two with a low-rank fusion."""
    fusion = args.fusion()
    batch, width = args.anchor_ids.shape[0], args.embedding.shape[1]
    matrix, vectors = fusion.weight, args.hidden()
    norm_e, norm_m, finite = None if args.folded is not None else fusion.norm_e, fusion.norm_m, None
    column = 0 if fusion.norm_e is None else width
    with _current(args.anchor_ids.device):
        if fusion.up is not None:
            vectors, finite = _down(args, fusion, source, norm_e, column)
            matrix, norm_e, norm_m, column = fusion.up, None, None, 0
        config = tail_config(matrix, block_embeds)
        kernels.t1_prep_tail_kernel[_grid(batch, width, config)](
            args.anchor_ids, *source.args(), vectors, vectors.stride(0), vectors.shape[1],
            args.embedding, args.embedding.stride(0), args.embedding.shape[0], width,
            args.folded, 0 if args.folded is None else args.folded.stride(0), args.mask_embed,
            matrix, 0 if matrix is None else matrix.stride(0), column, norm_e, norm_m,
            fusion.eps_e, fusion.eps_m, fusion.offset_e, fusion.offset_m, args.embed_scale, finite,
            t1, t1.stride(0), block_ids, block_ids.stride(0), block_ids.stride(1),
            block_embeds, block_embeds.stride(0), block_embeds.stride(1),
            certified.view(torch.uint8), certified.stride(0),
            batch, args.mask_id, args.num_masks, args.embedding_start, args.num_embeddings,
            ANCHORS=args.anchors, REPLACE=fusion.mode == "replace", AT_MASKS=fusion.slots == "masks",
            FACTORED=fusion.up is not None,
            **_options(config, args, width, vectors.shape[1], 0 if norm_e is None else width),
        )  # fmt: skip


def _down(
    args: PrepArgs, fusion: FusionArgs, source: T1Source, norm_e: torch.Tensor | None, column: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`down @ [...]` in fp32 `[B, r]`, and whether the mean squares are finite `[B]`."""
    batch, width = args.anchor_ids.shape[0], args.embedding.shape[1]
    down, hidden = fusion.down, args.hidden()
    assert down is not None
    rank, stride = down.shape[0], -(-down.shape[0] // 16) * 16
    scratch = workspace("t1_prep_low", hidden.device, 4 * batch * (stride + 1)).view(torch.float32)
    low, finite = scratch[: batch * stride].view(batch, stride), scratch[batch * stride :].view(torch.int32)
    config = tail_config(down, args.embedding)
    kernels.t1_prep_down_kernel[_grid(batch, rank, config)](
        args.anchor_ids, *source.args(), hidden, hidden.stride(0), hidden.shape[1],
        args.embedding, args.embedding.stride(0), args.embedding.shape[0], width,
        down, down.stride(0), column, norm_e, fusion.norm_m,
        fusion.eps_e, fusion.eps_m, fusion.offset_e, fusion.offset_m, args.embed_scale,
        low, stride, finite, batch, rank, args.embedding_start, args.num_embeddings,
        **_options(config, args, rank, hidden.shape[1], 0 if norm_e is None else width),
    )  # fmt: skip
    return low[:, :rank], finite


def _grid(batch: int, rows: int, config: TailConfig) -> tuple[int, int]:
    # programs that share matrix rows are neighbours, so the rows come from memory once
    return -(-batch // REQUESTS), -(-rows // config.rows)


def _options(config: TailConfig, args: PrepArgs, rows: int, hidden: int, embedding: int) -> dict[str, Any]:
    """Of a launch with so many matrix rows and such streams; 0 is no stream."""
    whole, scaled = config.whole(rows, hidden, embedding), args.embed_scale != 1.0
    options = {"SCALED": scaled, "num_warps": config.warps, "num_stages": config.stages} | config.constants(whole)
    return options | config.options(whole, scaled, embedding > 0)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
