"""Launches of the Triton kernels of block attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.block_attention import kernels, reference
from dmtp_kernels.ops.block_attention.config import LOG2E, MAX_DIM, MAX_ROWS, attention_config

_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


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
    if q.numel() == 0:
        return
    batch, slots, q_heads, dim = q.shape
    pages, page_size, heads, _ = k_cache.shape
    rows = slots if block_k is None else block_k.shape[1]
    capacity = page_table.shape[1] * page_size if pages else 0
    if dim > MAX_DIM or max(capacity, rows) > MAX_ROWS:
        reference.block_attention(
            q, k_cache, v_cache, page_table, ctx_len, block_k, block_v, block_len, window, window_ref, block_causal,
            valid_from, scale, k_scale, v_scale, soft_cap, sink, out, lse,
        )  # fmt: skip
        return
    group, count = q_heads // heads, processors(q.device)
    window = None if window is None else min(window, 2 * MAX_ROWS - 1)
    by_query = window is not None and window_ref == "query"
    span = capacity if window is None else min(capacity, window)
    config = attention_config(
        slots * group, rows, dim, q.element_size(), dim * (k_cache.element_size() + v_cache.element_size()), by_query,
        not count,
    )  # fmt: skip
    ragged = slots - 1 if by_query else 0
    chunk = config.split(batch, heads, slots * group, ragged, span, count, dim * lse.element_size())
    splits = max(1, -(-span // chunk))
    parts = (None, None, None) if splits == 1 else _partials(batch * heads * splits * slots * group, dim, lse)
    factor = dim**-0.5 if scale is None else scale
    outputs = (sink, out, *out.stride(), lse, *lse.stride())
    sizes = (heads, rows, slots, window, splits, chunk)
    common = {
        "GROUP": group, "D": dim, "DP": max(16, 1 << (dim - 1).bit_length()), "BY_QUERY": by_query,
        "WIDE": q.dtype == torch.float64, "enable_fp_fusion": False,
    }  # fmt: skip
    tiles = -(-slots * group // config.rows)
    with _current(q.device):
        kernels.block_attention_kernel[(batch * splits * heads * tiles,)](
            q, *q.stride()[:3], _bytes(k_cache), *k_cache.stride()[:3], _bytes(v_cache), *v_cache.stride()[:3],
            page_table, page_table.stride(0), pages, capacity, ctx_len, valid_from, block_len,
            block_k, *_strides(block_k), block_v, *_strides(block_v),
            k_scale, *_scale_strides(k_scale), v_scale, *_scale_strides(v_scale), *outputs, *parts, *sizes,
            P=page_size, M=config.rows, N=config.keys, NB=config.block_keys, FINE=config.fine, STAGES=config.stages,
            ONE_PAGE=window is None and page_size % config.keys == 0, CAUSAL=block_causal,
            SCALE=factor * LOG2E if soft_cap is None else factor / soft_cap,
            CAP=None if soft_cap is None else soft_cap * LOG2E,
            FP8_K=_FP8.get(k_cache.dtype), FP8_V=_FP8.get(v_cache.dtype),
            num_warps=config.warps, num_stages=config.stages, **common,
        )  # fmt: skip
        if splits > 1:
            part = config.combine_rows
            kernels.block_attention_combine_kernel[(batch * heads * -(-slots * group // part),)](
                *parts, capacity, ctx_len, valid_from, block_len, *outputs, *sizes,
                R=part, PER=config.coarse // chunk, IN_CACHE=block_k is None, **common,
            )  # fmt: skip


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype in _FP8 else cache


def _partials(rows: int, dim: int, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = rows * (dim + 2) * lse.element_size()
    scratch = workspace("block_attention", lse.device, size)[:size].view(lse.dtype)
    return scratch[: rows * dim], scratch[rows * dim : rows * (dim + 1)], scratch[rows * (dim + 1) : rows * (dim + 2)]


def _strides(block: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if block is None else block.stride()[:3]


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, int]:
    """Of a scale `[]`, `[1]`, `[Hkv]` or `[B, Hkv]`, over requests and heads."""
    if scale is None or scale.numel() == 1:
        return 0, 0
    return (0, scale.stride(0)) if scale.dim() == 1 else (scale.stride(0), scale.stride(1))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
