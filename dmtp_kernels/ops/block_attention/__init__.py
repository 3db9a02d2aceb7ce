"""Attention of one decoding block over a paged history, with the masks of the round as explicit arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmtp_kernels._supports import takes_packed
from dmtp_kernels.ops._checks import as_scale
from dmtp_kernels.ops.block_attention.op import BLOCK_ATTENTION


class Attention(NamedTuple):
    """Output of `block_attention`."""

    out: torch.Tensor  # [B, S, Hq, D]
    lse: torch.Tensor  # [B, S, Hq] fp32


@takes_packed()
def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    *,
    block_k: torch.Tensor | None = None,
    block_v: torch.Tensor | None = None,
    block_len: torch.Tensor | None = None,
    window: int | None = None,
    window_ref: str = "anchor",
    block_causal: bool = False,
    valid_from: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    soft_cap: float | None = None,
    sink: torch.Tensor | None = None,
) -> Attention:
    """Attention of S query slots per request over its paged context and its own block.

    For decoding: it has no backward. Where q requires grad outside `torch.no_grad()`, out carries a grad_fn that warns
    and gives no gradient.

    Positions are row numbers of the page table: context row p lies at page `page_table[b, p // P]`, offset `p % P`;
    block row r has position `ctx_len[b] + r`. The block has Sb rows and the queries are its last S, so query s has
    position `ctx_len[b] + Sb - S + s`.

    Args:
        q: `[B, S, Hq, D]` fp32/bf16/fp16/fp64.
        k_cache, v_cache: `[pages, P, Hkv, D]`, any strides with a contiguous last dimension; dtype of `q`, or fp8
            (e4m3fn, e5m2) with `k_scale`/`v_scale`. Hq must be a multiple of Hkv; query head h reads head
            `h // (Hq // Hkv)`.
        page_table: `[B, MP]` int32/int64. Only entries of visible rows count: an id outside `[0, pages)` hides rows.
        ctx_len: `[B]` int32/int64, context rows strictly before block row 0.
        block_k, block_v: `[B, Sb, Hkv, D]`, Sb >= S, dtype of `q`. None: Sb = S and the block's rows lie in the cache
            at rows `ctx_len .. ctx_len + S - 1`.
        block_len: `[B]` int32/int64, valid block rows from the front (default Sb; clamped to 0..Sb).
        window: rows of context that stay visible; None: all, 0: none.
        window_ref: `"anchor"`: context rows `p >= ctx_len - window`, the same set for every query; the block is never
            cut. `"query"`: keys at positions `>= position(s) - (window - 1)`, context and block alike, and without
            `block_causal` also `<= position(s) + window - 1` (flash-attention's `(W-1, 0)` and `(W-1, W-1)`).
        block_causal: query s sees block rows up to its own; False: the whole block.
        valid_from: `[B]` int32/int64, first context row ever written; cuts context only.
        scale: factor of the scores, default `D ** -0.5`.
        k_scale, v_scale: float or fp32 tensor `[]`, `[1]`, `[Hkv]` or `[B, Hkv]`; multiplies cache rows only, never
            `block_k`/`block_v`.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None: off.
        sink: `[Hq]` floating, a score per head that joins the denominator and has no value row.

    Returns:
        `Attention(out, lse)`: `out` `[B, S, Hq, D]` in the dtype of `q`; `lse` `[B, S, Hq]` fp32 (fp64 for fp64 input),
        the natural log of the denominator, sink included. A query that sees no key gives 0 and -inf, sink or not. A row
        is inert (0 and -inf) when `ctx_len` is negative or when its rows do not fit its `MP * P` table rows.

    Raises:
        ValueError, TypeError: a shape, dtype, device, stride or option is wrong; the message names the argument.

    Source: masks of the DMTP description, section 6.2; README.md beside this file lists the public rules they cover.
    """
    for name, tensor in (
        ("q", q),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("page_table", page_table),
        ("ctx_len", ctx_len),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: is a {type(tensor).__name__}, must be a tensor")
    return Attention(
        *BLOCK_ATTENTION.call(
            q,
            k_cache,
            v_cache,
            page_table,
            ctx_len,
            block_k=block_k,
            block_v=block_v,
            block_len=block_len,
            window=window,
            window_ref=window_ref,
            block_causal=block_causal,
            valid_from=valid_from,
            scale=scale,
            k_scale=None if k_scale is None else as_scale("k_scale", k_scale, q.device),
            v_scale=None if v_scale is None else as_scale("v_scale", v_scale, q.device),
            soft_cap=soft_cap,
            sink=sink,
        )
    )
