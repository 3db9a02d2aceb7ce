"""What an engine writes in PyTorch where an op is not there: the yardstick of `dmtp bench ops`.

A chain takes the op's inputs in schema order. It computes the same step, not the same bits: float32 instead of float64,
the generator's draws instead of keyed ones, logits instead of certificates. Ops without a chain here are measured
against their own reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dmtp_kernels.ops.t1_prep.args import PrepArgs

Chain = Callable[..., Any]


def select(hidden: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return (hidden @ weight.T).argmax(dim=-1)


def rescore(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    # as a table of embeddings its rows are gathered three times as fast on a CPU
    logits = torch.bmm(F.embedding(ids, weight), hidden[:, :, None])[:, :, 0]
    return ids.gather(1, logits.argmax(dim=1, keepdim=True))


def t1(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, argmax, gathers, two norms, projection, block, of the residual with an embedding half."""
    args = PrepArgs(*inputs)
    assert args.head_weight is not None and args.norm_e is not None and args.norm_m is not None
    assert args.fusion_weight is not None
    anchors, hidden, table = args.anchor_ids, args.h_mtp, args.embedding
    batch, width = hidden.shape
    first = (hidden @ args.head_weight.T).argmax(dim=-1)
    token = table[first]
    e = F.rms_norm(token, (table.shape[1],), args.norm_e, args.eps_e)
    h = F.rms_norm(hidden, (width,), args.norm_m, args.eps_m)
    fused = token + F.linear(torch.cat((e, h), dim=-1), args.fusion_weight)
    masks = table[args.mask_id].expand(batch, args.num_masks, table.shape[1])
    block = torch.cat((table[anchors][:, None], fused[:, None], masks), dim=1)
    filler = anchors.new_full((batch, args.num_masks), args.mask_id)
    return first, torch.cat((anchors[:, None], first[:, None], filler), dim=1), block


def attention(
    q: torch.Tensor,  # [B, S, Hq, D]
    k_cache: torch.Tensor,  # [pages, P, Hkv, D]
    v_cache: torch.Tensor,
    page_table: torch.Tensor,  # [B, MP]
    ctx_len: torch.Tensor,
    block_k: torch.Tensor,  # [B, S, Hkv, D]
    block_v: torch.Tensor,
    _block_len: None,
    window: int | None,
    *_: Any,
) -> torch.Tensor:
    """Only pages that are seen are gathered for torch's attention; every history fills its table."""
    size, slots = k_cache.shape[1], q.shape[1]
    history = page_table.shape[1] * size
    first = 0 if window is None else max(0, history - window)
    page, skip = first // size, first % size
    seen = torch.ones(slots, history - first, dtype=torch.bool, device=q.device)
    block = torch.ones(slots, slots, dtype=torch.bool, device=q.device)
    mask = torch.cat((seen, block.tril() if window is None else block), dim=1)
    keys, values = (
        torch.cat((cache[page_table[:, page:].long()].flatten(1, 2)[:, skip:], rows), dim=1).transpose(1, 2)
        for cache, rows in ((k_cache, block_k), (v_cache, block_v))
    )
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)


def sample(logits: torch.Tensor, temperature: torch.Tensor, *_: Any) -> torch.Tensor:
    weight = torch.softmax(logits.float() / temperature[:, None], dim=-1)
    return weight.div_(torch.empty_like(weight).exponential_()).argmax(dim=-1)


def rejection(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Token by token: keep where u q < p, then a draw from what p has more than q."""
    p, q, p_drawn, q_drawn, u = _distributions(*inputs)
    kept = (u * q_drawn < p_drawn).long().cumprod(dim=1).sum(dim=1)
    return _finish(p, q, kept, torch.ones_like(u[:, 0]), *inputs)


def block(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Block verification: the longest prefix whose running ratio passes."""
    p, q, p_drawn, q_drawn, u = _distributions(*inputs)
    weight = torch.ones_like(u[:, 0])
    kept, scale = torch.zeros_like(inputs[0][:, 0]), weight
    for i in range(1, u.shape[1] + 1):
        weight = (weight * p_drawn[:, i - 1] / q_drawn[:, i - 1]).clamp(max=1.0)
        chance = weight
        if i < u.shape[1]:
            surplus = (weight[:, None] * p[:, i] - q[:, i]).clamp(min=0.0).sum(dim=1)
            chance = surplus / (surplus + 1.0 - weight)
        longer = u[:, i - 1] < chance
        kept, scale = torch.where(longer, i, kept), torch.where(longer, weight, scale)
    return _finish(p, q, kept, scale, *inputs)


def _distributions(
    candidates: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    q, drawn = rest[4], candidates[:, 1:, None]
    p = torch.softmax(logits.float() / temperature[:, None, None], dim=-1)
    u = torch.rand(drawn.shape[:2], device=p.device)
    return p, q, p[:, :-1].gather(2, drawn)[:, :, 0], q.gather(2, drawn)[:, :, 0], u


def _finish(
    p: torch.Tensor,  # [B, R, V]
    q: torch.Tensor,  # [B, K, V]
    kept: torch.Tensor,  # [B]
    scale: torch.Tensor,  # [B]
    candidates: torch.Tensor,  # [B, R]
    _logits: torch.Tensor,
    _temperature: torch.Tensor,
    _seed: torch.Tensor,
    _position: torch.Tensor,
    stop_ids: torch.Tensor,  # [B, E]
    budget: torch.Tensor,  # [B]
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    row = torch.arange(len(kept), device=kept.device)
    refused = kept < q.shape[1]
    following = p[row, kept]
    surplus = (scale[:, None] * following - q[row, kept.clamp(max=q.shape[1] - 1)]).clamp_(min=0.0)
    weight = torch.where(refused[:, None], surplus, following)
    bonus = weight.div_(torch.empty_like(weight).exponential_()).argmax(dim=-1)
    column = torch.arange(candidates.shape[1], device=kept.device)
    shifted = torch.cat((candidates[:, 1:], bonus[:, None]), dim=1)
    tokens = torch.where(column == kept[:, None], bonus[:, None], shifted)
    stop = (tokens[:, :, None] == stop_ids[:, None]).any(dim=2)
    before = stop.long().cumsum(dim=1) - stop.long()
    valid = (column <= kept[:, None]) & (column < budget[:, None]) & (before == 0)
    count = valid.sum(dim=1)
    return count, torch.where(valid, tokens, -1), (stop & valid).any(dim=1)


CHAINS: dict[str, Chain] = {
    "lm_head_select": select,
    "lm_head_rescore": rescore,
    "fused_t1_prep": t1,
    "block_attention": attention,
    "sample_rows": sample,
    "accept_rejection": rejection,
    "accept_block": block,
}
