"""Independent truth of block attention: a boolean mask filled by loops over positions, then dense float64 attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from dmtp_kernels.ops.block_attention import Attention, block_attention

Array = np.ndarray[Any, Any]
attend: Any = block_attention


def visible(
    ctx_len: int,
    slots: int,
    rows: int,
    *,
    window: int | None = None,
    window_ref: str = "anchor",
    block_causal: bool = False,
    valid_from: int = 0,
    block_len: int | None = None,
) -> Array:
    """`[S, ctx_len + rows]` bool: which key each query sees, keys numbered by position from table row 0."""
    mask = np.zeros((slots, max(ctx_len, 0) + rows), dtype=bool)
    if ctx_len < 0:
        return mask
    for s in range(slots):
        here = ctx_len + rows - slots + s  # position of the query
        for p in range(ctx_len):
            if p < valid_from:
                continue
            if window is None:
                mask[s, p] = True
            elif window_ref == "anchor":
                mask[s, p] = ctx_len - p <= window
            else:
                mask[s, p] = here - p < window
        for p in range(ctx_len, ctx_len + (rows if block_len is None else block_len)):
            if block_causal and p > here:
                continue
            mask[s, p] = window is None or window_ref == "anchor" or abs(here - p) < window
    return mask


def dense(q: Array, k: Array, v: Array, mask: Array, scale: float, soft_cap: float | None, sink: Array | None) -> Any:
    """q `[S, Hq, D]`, k and v `[n, Hkv, D]`, mask `[S, n]` -> out `[S, Hq, D]`, lse `[S, Hq]`, all float64."""
    slots, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros((slots, heads, dim)), np.full((slots, heads), -np.inf)
    for s in range(slots):
        seen = np.flatnonzero(mask[s])
        for h in range(heads if len(seen) else 0):
            score = k[seen, h // group] @ q[s, h] * scale
            if soft_cap is not None:
                score = soft_cap * np.tanh(score / soft_cap)
            extra = -np.inf if sink is None else sink[h]
            top = max(score.max(), extra)
            total = np.exp(score - top).sum() + np.exp(extra - top)
            out[s, h] = np.exp(score - top) @ v[seen, h // group] / total
            lse[s, h] = top + math.log(total)
    return out, lse


def oracle(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`block_attention` in float64, for rows whose context fits the table."""
    batch, slots, _, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    block_k, block_v = options.get("block_k"), options.get("block_v")
    rows = slots if block_k is None else block_k.shape[1]
    sink = options.get("sink")
    outs, lses = [], []
    for b in range(batch):
        length = int(ctx_len[b])
        per_row = {n: None if options.get(n) is None else int(options[n][b]) for n in ("valid_from", "block_len")}
        mask = visible(
            length,
            slots,
            rows,
            window=options.get("window"),
            window_ref=options.get("window_ref", "anchor"),
            block_causal=options.get("block_causal", False),
            valid_from=per_row["valid_from"] or 0,
            block_len=per_row["block_len"],
        )
        k, v = np.zeros((mask.shape[1], kv_heads, dim)), np.zeros((mask.shape[1], kv_heads, dim))
        for p in np.flatnonzero(mask.any(axis=0)):  # unseen rows stay 0: they may be poison or have no page
            for dst, cache, block, name in ((k, k_cache, block_k, "k_scale"), (v, v_cache, block_v, "v_scale")):
                if p >= length and block is not None:
                    dst[p] = block[b, p - length].double().numpy()
                else:
                    row = cache[int(page_table[b, p // page_size]), p % page_size].double().numpy()
                    dst[p] = row * _factor(options.get(name), b)
        scale = options.get("scale")
        truth = dense(
            q[b].double().numpy(),
            k,
            v,
            mask,
            dim**-0.5 if scale is None else scale,
            options.get("soft_cap"),
            None if sink is None else sink.double().numpy(),
        )
        outs.append(torch.from_numpy(truth[0]))
        lses.append(torch.from_numpy(truth[1]))
    return torch.stack(outs), torch.stack(lses)


def _factor(scale: torch.Tensor | float | None, b: int) -> Any:
    if scale is None or isinstance(scale, float):
        return 1.0 if scale is None else scale
    row = scale[b] if scale.dim() == 2 else scale
    return row.double().numpy().reshape(-1, 1)


def check(*inputs: Any, truth: tuple[torch.Tensor, torch.Tensor] | None = None, **options: Any) -> Attention:
    """Run the op and compare it with the oracle: within the rounding of the dtype, finite wherever the truth is.

    `truth` is what the oracle says, where that is known already.
    """
    got: Attention = attend(*inputs, **options)
    want_out, want_lse = truth or oracle(*inputs[:5], **options)
    step = torch.finfo(inputs[0].dtype).eps
    inner = torch.finfo(got.lse.dtype).eps
    size = want_out.abs().max().clamp(min=1.0).item()
    # one rounding of the output, plus some tens of roundings of the accumulation
    torch.testing.assert_close(got.out.double(), want_out, rtol=0, atol=size * (step + 40 * inner))
    torch.testing.assert_close(got.lse.double(), want_lse, rtol=40 * inner, atol=40 * inner)
    return got


def paged(
    generator: torch.Generator,
    *,
    batch: int,
    slots: int,
    heads: tuple[int, int],
    dim: int,
    pages: int,
    page_size: int,
    dense_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
) -> tuple[Any, dict[str, Any]]:
    """Random queries, a cache with its pages in shuffled order and `spare` pages of NaN, and a dense block if asked."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    order = torch.randperm(batch * pages + spare, generator=generator)
    table, unused = order[: batch * pages].view(batch, pages), order[batch * pages :]
    caches = [normal(batch * pages + spare, page_size, heads[1], dim) for _ in range(2)]
    for cache in caches:
        cache[unused] = float("nan")
    q = normal(batch, slots, heads[0], dim)
    zeros = torch.zeros(batch, dtype=torch.int64)
    block = {}
    if dense_rows is not None:
        block = {name: normal(batch, dense_rows, heads[1], dim) for name in ("block_k", "block_v")}
    return (q, caches[0], caches[1], table, zeros), block
