"""What FlashAttention's documentation says of the calls we make, as slow PyTorch: stands in where no GPU can run it.

Sources: docstrings of `flash_attn_with_kvcache` (2 and 3) and `flash_attn_varlen_func` (4) in
Dao-AILab/flash-attention, and for 2 `softmax.h`, which gives an empty row the log-sum-exp +inf.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor


def window_mask(queries: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    """`[queries, keys]` bool, aligned to the bottom right corner; -1 is no bound."""
    row = torch.arange(queries)[:, None] + keys - queries
    column = torch.arange(keys)[None]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        mask &= column >= row - left
    if right >= 0:
        mask &= column <= row + right
    return mask


def attention(
    q: Tensor,  # [B, n, Hq, D]
    k: Tensor,  # [B, m, Hkv, D], or [pages, P, Hkv, D] with a table
    v: Tensor,
    lengths: Tensor,  # [B] int32
    table: Tensor | None,  # [B, MP] int32
    skip: Tensor | None,  # [B] int32
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    empty: float,
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    assert lengths.dtype == torch.int32 and (table is None or table.dtype == torch.int32)
    out, lse = torch.zeros_like(q), torch.full((batch, heads, queries), empty)
    for b in range(batch):
        length = int(lengths[b])
        left = 0 if skip is None else int(skip[b])
        assert 0 <= left <= length
        if table is None:
            keys, values = k[b, :length], v[b, :length]
        else:
            size = k.shape[1]
            pages = table[b, : -(-length // size)].long()
            assert len(pages) * size >= length and ((pages >= 0) & (pages < k.shape[0])).all()
            keys, values = (c[pages].flatten(0, 1)[left:length] for c in (k, v))
        mask = window_mask(queries, keys.shape[0], causal, *window)
        group = heads // k.shape[2]
        scores = torch.einsum("nhd,mhd->hnm", q[b].float(), keys.float().repeat_interleave(group, dim=1)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -math.inf)
        seen = mask.any(dim=1)
        weights = scores.softmax(dim=-1)[:, seen]
        sums = torch.einsum("hnm,mhd->nhd", weights, values.float().repeat_interleave(group, dim=1))
        out[b, seen] = sums.to(q.dtype)
        lse[b][:, seen] = scores.logsumexp(dim=-1)[:, seen]
    return out, lse


class Two:
    """`flash_attn`"""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
        block_table: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert block_table is None or k_cache.shape[1] % 256 == 0
        assert return_softmax_lse and num_splits == 1
        return attention(
            q, k_cache, v_cache, cache_seqlens, block_table, None, softmax_scale, causal, window_size, softcap, math.inf
        )


class Three:
    """`flash_attn_interface`"""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None,
        rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
        cache_leftpad: Any = None, page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
        max_seqlen_q: Any = None, rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None,
        v_descale: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert return_softmax_lse and num_splits == 1
        return attention(
            q, k_cache, v_cache, cache_seqlens, page_table, cache_leftpad, softmax_scale, causal, window_size, softcap,
            -math.inf,
        )  # fmt: skip


class Four:
    """`flash_attn.cute`"""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: float = 0.0,
        num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert return_lse and num_splits == 1
        bounds = tuple(-1 if bound is None else bound for bound in window_size)
        return attention(q, k, v, seqused_k, page_table, None, softmax_scale, causal, bounds, softcap, -math.inf)  # type: ignore[arg-type]


MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
DOCUMENTED: dict[int, Any] = {2: Two, 3: Three, 4: Four}
