"""The folded table: the embedding half of a fusion computed once for every token."""

from __future__ import annotations

import torch

from dmtp_kernels.ops._checks import FLOAT_DTYPES, check_instance, check_real, check_tensor
from dmtp_kernels.ops.t1_prep.fusion import Fusion
from dmtp_kernels.ops.t1_prep.reference import add, project, rms_norm, scaled

_ROWS = 1024


def fold_fusion(
    embedding: torch.Tensor, fusion: Fusion, *, embed_scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`E'[v] = E[v] + W_e RMS_e(E[v])` (without the first term for `replace`), for `fused_t1_prep(..., folded=...)`.

    With it T1's slot costs one row gather and one add after the selection; the result differs from the unfolded one by
    rounding only (one rounding of E' to `dtype`).

    Args:
        embedding: `[Ve, E]`.
        fusion: a mode whose matrix reads the embedding, at T1's slot.
        embed_scale: as passed to `fused_t1_prep`.
        dtype: of the table (default: the embedding's; fp32 keeps the sum unrounded).

    Returns:
        `[Ve, E]` contiguous.

    Raises:
        ValueError, TypeError: the fusion reads no embedding stream, or the shapes do not fit.
    """
    check_instance("embedding", embedding, torch.Tensor)
    check_instance("fusion", fusion, Fusion)
    check_real("embed_scale", embed_scale)
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype: is {dtype}, must be one of {', '.join(str(d) for d in FLOAT_DTYPES)}")
    check_tensor("embedding", embedding, [None, None], FLOAT_DTYPES, {})
    args = fusion.args()
    if args.norm_e is None or args.first is None:
        raise ValueError(f"fusion: mode {args.mode!r} reads no embedding stream, must read [RMS_e(e); RMS_m(h)]")
    width = embedding.shape[1]
    if args.norm_e.shape[0] != width:
        raise ValueError(f"embedding: dimension 1 is {width}, must be {args.norm_e.shape[0]} like norm_e")
    table = torch.empty(embedding.shape, dtype=dtype or embedding.dtype, device=embedding.device)
    compute = torch.promote_types(embedding.dtype, torch.float32)
    for start in range(0, embedding.shape[0], _ROWS):
        rows = scaled(embedding[start : start + _ROWS], embed_scale)
        stream, _ = rms_norm(rows.to(compute), args.norm_e, args.eps_e, args.offset_e)
        delta = project(args.first[:, :width], stream)
        if args.up is not None:
            delta = project(args.up, delta)
        wide = rows.to(table.dtype)
        table[start : start + _ROWS] = delta if args.mode == "replace" else add(wide, delta)
    return table
