"""Block attention on the compiled CUDA kernels: one launch, or two where a request may have several chunks."""

from __future__ import annotations

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.block_attention import reference


def block_attention(
    q: torch.Tensor,  # [B, S, Hq, D]
    k_cache: torch.Tensor,  # [pages, P, Hkv, D]
    v_cache: torch.Tensor,  # [pages, P, Hkv, D]
    page_table: torch.Tensor,  # [B, MP]
    ctx_len: torch.Tensor,  # [B]
    block_k: torch.Tensor | None,  # [B, Sb, Hkv, D]
    block_v: torch.Tensor | None,  # [B, Sb, Hkv, D]
    block_len: torch.Tensor | None,  # [B]
    window: int | None,
    window_ref: str,
    block_causal: bool,
    valid_from: torch.Tensor | None,  # [B]
    scale: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sink: torch.Tensor | None,  # [Hq]
    out: torch.Tensor,  # [B, S, Hq, D] out
    lse: torch.Tensor,  # [B, S, Hq] out
) -> None:
    """As `reference.block_attention`; float64, and what the kernels do not take, goes there."""
    if q.numel() == 0:
        return
    taken = -1
    if q.dtype != torch.float64:
        factors = q.shape[0], k_cache.shape[2]
        tensors = [
            q, k_cache, v_cache, page_table, ctx_len, block_k, block_v, block_len, valid_from,
            None if k_scale is None else k_scale.expand(factors),
            None if v_scale is None else v_scale.expand(factors),
            sink,
        ]  # fmt: skip
        places, count = [], 0
        for tensor in tensors:
            places.append(-1 if tensor is None else count)
            count += tensor is not None
        options = (
            -1 if window is None else window, window_ref == "query", block_causal,
            q.shape[3] ** -0.5 if scale is None else scale, soft_cap or 0.0,
        )  # fmt: skip
        call = ([t for t in tensors if t is not None], places, *options, out, lse)
        run = backends.cuda_library().block_attention
        taken = run(*call, workspace("block_attention_cuda", q.device, 0))
        if taken > 0:
            taken = run(*call, workspace("block_attention_cuda", q.device, taken))
    if taken < 0:
        reference.block_attention(
            q, k_cache, v_cache, page_table, ctx_len, block_k, block_v, block_len, window, window_ref, block_causal,
            valid_from, scale, k_scale, v_scale, soft_cap, sink, out, lse,
        )  # fmt: skip
