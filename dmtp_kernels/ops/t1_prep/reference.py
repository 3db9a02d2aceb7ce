"""T1 preparation in eager PyTorch: the definition every kernel must match."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops.lm_head import UNCERTIFIED, canonical_dot, decode_key
from dmtp_kernels.ops.lm_head import reference as lm_head
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.ops.t1_prep.fusion import FusionArgs

_INPUTS = len(PrepArgs._fields)
_CHUNK_ELEMENTS = 1 << 22


def fused_t1_prep(*values: Any) -> None:
    """The inputs of `PrepArgs`, then outputs t1 `[B]`, block_ids `[B, S]`, block_embeds `[B, S, E]`, certified."""
    args = PrepArgs(*values[:_INPUTS])
    t1, block_ids, block_embeds, certified = values[_INPUTS:]
    anchor = args.anchor_ids.to(torch.int64)
    live = anchor >= 0
    token, proved = _select(args)
    t1.copy_(torch.where(live & (token >= 0) & (token < args.num_embeddings), token, -1))
    anchor = torch.where(live & (anchor < args.num_embeddings), anchor, -1)
    masks = torch.where(live, args.mask_id, -1)[:, None].expand(-1, args.num_masks)
    heads = [anchor, t1] if args.anchors == 2 else [t1]
    block_ids.copy_(torch.cat([torch.stack(heads, dim=1), masks], dim=1))
    certified.copy_(proved & (t1 >= 0) & (anchor >= 0))

    local = block_ids - args.embedding_start
    owned = (block_ids >= 0) & (local >= 0) & (local < args.embedding.shape[0])  # [B, S]
    block = scaled(args.embedding[local.clamp(0, args.embedding.shape[0] - 1)], args.embed_scale)
    if args.mask_embed is not None:
        block[:, args.anchors :] = scaled(args.mask_embed.to(block.dtype), args.embed_scale)
    fusion = args.fusion()
    if fusion.mode != "none":
        finite = _fuse(args, fusion, block, local)
        certified &= finite
    block_embeds.copy_(torch.where(owned[:, :, None], block, 0))


def _select(args: PrepArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """T1 `[B]` (-1 where there is none) and whether it is proved."""
    if args.t1_override is not None:
        return args.t1_override.to(torch.int64), torch.ones_like(args.t1_override, dtype=torch.bool)
    head = args.head()
    assert head is not None
    key = args.anchor_ids.new_empty((args.anchor_ids.shape[0], 1), dtype=torch.int64)
    status = args.anchor_ids.new_empty((args.anchor_ids.shape[0],), dtype=torch.int32)
    lm_head.lm_head_select(args.h_mtp, *head, 1, args.logit_dtype, key, status)
    return decode_key(key)[0][:, 0], (status & UNCERTIFIED) == 0


def _fuse(args: PrepArgs, fusion: FusionArgs, block: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Change the fused slots of `block [B, S, E]` in place; whether every norm's mean square is finite `[B]`."""
    slot = args.anchors - 1
    plain = base = block[:, slot]
    hidden = args.hidden()
    dtype = torch.float64 if torch.float64 in (block.dtype, hidden.dtype) else torch.float32
    assert fusion.norm_m is not None and fusion.first is not None
    stream, finite = rms_norm(hidden.to(dtype), fusion.norm_m, fusion.eps_m, fusion.offset_m)
    first = fusion.first
    if args.folded is not None:
        first = first[:, plain.shape[1] :]
        base = args.folded[local[:, slot].clamp(0, args.folded.shape[0] - 1)]
    elif fusion.norm_e is not None:
        embedding, finite_e = rms_norm(plain.to(dtype), fusion.norm_e, fusion.eps_e, fusion.offset_e)
        stream, finite = torch.cat([embedding, stream], dim=1), finite & finite_e
    delta = project(first, stream)
    if fusion.up is not None:
        delta = project(fusion.up, delta)
    if fusion.slots == "masks":
        block[:, args.anchors :] = add(block[:, args.anchors :], delta[:, None])
    elif fusion.mode == "replace":
        whole = delta if args.folded is None else base + delta
        block[:, slot] = torch.where(delta.isfinite(), whole.to(block.dtype), plain)
    else:
        block[:, slot] = add(base, delta).to(block.dtype)
    return finite


def scaled(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """`rows * factor` rounded to the rows' dtype; the rows themselves when the factor is 1."""
    if factor == 1.0:
        return rows
    return (rows.to(torch.promote_types(rows.dtype, torch.float32)) * factor).to(rows.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of `x [n, D]` in its own dtype, and whether each mean square is finite `[n]`."""
    mean = canonical_dot(x, x[:, None]) / x.shape[1]  # [n, 1]
    return x * (1.0 / (mean + eps).sqrt()) * (weight.to(x.dtype) + offset), mean[:, 0].isfinite()


def project(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x @ matrix.T` `[n, out]`, one vector at a time: a matmul picks other kernels, so other bits, for other n."""
    out = x.new_empty(x.shape[0], matrix.shape[0])
    step = max(1, _CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        rows = matrix[start : start + step].to(x.dtype)
        for i in range(x.shape[0]):
            out[i, start : start + step] = (rows * x[i]).sum(dim=1)
    return out


def add(plain: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """`plain + delta`; an element whose delta is zero or not finite keeps its bits (x + 0 would turn -0.0 into 0.0)."""
    return torch.where((delta != 0) & delta.isfinite(), (plain + delta).to(plain.dtype), plain)
