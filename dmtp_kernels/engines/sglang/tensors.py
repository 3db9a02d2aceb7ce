"""The ops on SGLang's tensors, by its names, shapes, dtypes and conventions; nothing here imports SGLang.

SGLang's conventions: `req_to_token[max_reqs + 1, max_len]` int32 maps a position to a KV slot; slot 0 and row 0 are
dummies that padded rows of a graph (`req_pool_indices` 0, length 1) read and write. `prefix_lens[bs]` is the position
of the pending token A. A block is `[A, T1, MASK x6]`, `block_size` slots at positions `prefix_lens ..`, and a
verification has as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dmtp_kernels.ops.accept import accept_prefix
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.draft_pages import DraftPages, draft_page_table_from_slots
from dmtp_kernels.ops.lm_head import LMHead, key_token, lm_head_select, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep
from dmtp_kernels.ops.t1_prep.distributed import fused_t1_prep_sharded

NULL_SLOT = 0
"""The slot that padded rows write."""
_ENDLESS = 1 << 40


def head_of(
    weight: torch.Tensor, *, num_org: int | None = None, org_vocab_start: int = 0, format: str = "int8"
) -> LMHead:
    """The head of one rank's vocabulary shard: rows `0..num_org-1` of `weight[Vl, H]`, whose ids start at
    `org_vocab_start`; the rest is padding (`VocabParallelEmbeddingShardIndices`). Packed once, the weight is borrowed.

    Raises:
        ValueError, TypeError: as `pack_lm_head`.
    """
    return pack_lm_head(weight, format=format, num_valid=num_org, id_offset=org_vocab_start)


def select(hidden: torch.Tensor, head: LMHead, group: Any = None, *, logit_dtype: str = "float32") -> torch.Tensor:
    """The greedy token `[n]` int64 of `hidden[n, H]`, the same on every rank; ties go to the lowest id.

    With a `torch.distributed` group: one MAX all-reduce of `[n]` int64 keys, in place of SGLang's gathers of values and
    of ids. `logit_dtype="bfloat16"` compares rounded logits, as SGLang does. -1 where every logit is NaN.
    """
    key, _ = lm_head_select(hidden, head, logit_dtype=logit_dtype)
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(key, torch.distributed.ReduceOp.MAX, group=group)
    return key_token(key).flatten()


def prepare_block(
    bonus_tokens: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    h_mtp: torch.Tensor,
    head: LMHead | None,
    embedding: torch.Tensor,
    fusion: Fusion,
    *,
    block_size: int,
    mask_token_id: int,
    t1: torch.Tensor | None = None,
    group: Any = None,
    mask_embed: torch.Tensor | None = None,
    embed_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, slots and embeddings of the block `[A, T1, MASK...]`, T1 selected and fused.

    Args:
        bonus_tokens: `[bs]` the pending tokens A.
        prefix_lens, req_pool_indices, req_to_token: as above.
        h_mtp: `[bs, H]` the MTP output that predicts T1, in the form the head reads.
        head: this rank's head, None with `t1[bs]`, chosen elsewhere.
        embedding: `[V, H]` the whole table; `mask_embed[H]` stands in for the mask's row, `embed_scale` multiplies all.
        fusion: what is added to T1's embedding.
        group: ranks that the head is cut over; then T1 takes one all-reduce.

    Returns:
        `block_ids`, `positions`, `cache_loc`, all `[bs, block_size]` int64, and `input_embeds[bs * block_size, H]`, as
        `ForwardBatch` takes them. Positions past the table have slot 0. Where T1 is undecided (NaN) its slot is a MASK,
        which verification rejects or accepts like any other candidate.
    """
    options: dict[str, Any] = {
        "mask_id": mask_token_id,
        "num_masks": block_size - 2,
        "mask_embed": mask_embed,
        "embed_scale": embed_scale,
    }
    if group is not None and head is not None:
        _, ids, embeds, _ = fused_t1_prep_sharded(bonus_tokens, h_mtp, head, embedding, fusion, group=group, **options)
    else:
        _, ids, embeds, _ = fused_t1_prep(bonus_tokens, h_mtp, head, embedding, fusion, t1_override=t1, **options)
    offsets = torch.arange(block_size, device=prefix_lens.device)
    positions = prefix_lens.long()[:, None] + offsets
    ids = torch.where(ids < 0, mask_token_id, ids)
    return ids, positions, block_slots(prefix_lens, req_pool_indices, req_to_token, block_size), embeds.flatten(0, 1)


def block_slots(
    prefix_lens: torch.Tensor, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots `[bs, block_size]` int64 of the positions `prefix_lens ..`; 0 in every slot of a row that does not fit."""
    pages = draft_page_table_from_slots(
        req_to_token, prefix_lens, window=0, page_size=1, req_pool_indices=req_pool_indices, block_slots=block_size
    )
    return pages.draft_table[:, :block_size].long()


def slots_of(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Slots `[bs, R]` int64 of any `positions[bs, R]`; 0 from row `valid[bs]` on and past the table."""
    column = torch.arange(positions.shape[1], device=positions.device)
    inside = (column < valid[:, None]) & (positions < req_to_token.shape[1])
    slots = req_to_token[req_pool_indices[:, None], positions.clamp(max=req_to_token.shape[1] - 1)]
    return torch.where(inside, slots.long(), NULL_SLOT)


def window_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    window: int,
    page_size: int,
    block_size: int,
) -> DraftPages:
    """Page table of the drafter's last `window` context rows and its block, from the target's slots: one launch.

    `draft_table[bs, pages]` int32 is what attention reads, `draft_len[bs]` SGLang's compact length (the window rounded
    down to a page), `draft_len + block_size` its `cache_seqlens`; `kv_skip[bs]` counts the leading rows of the first
    page that lie before the window, which SGLang lets the drafter see. Columns that a row does not use are 0, in SGLang
    stale.
    """
    return draft_page_table_from_slots(
        req_to_token,
        prefix_lens,
        window=window,
        page_size=page_size,
        req_pool_indices=req_pool_indices,
        block_slots=block_size,
    )


def commit(
    rows_k: Sequence[torch.Tensor],
    rows_v: Sequence[torch.Tensor],
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    cache_loc: torch.Tensor,
    commit_lens: torch.Tensor,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> torch.Tensor:
    """Write rows `0 .. commit_lens[b] - 1` of every layer to `cache_loc[bs, block_size]`, all layers in one launch.

    Args:
        rows_k, rows_v: per layer `[bs * block_size, Hkv, D]`, or flat `[bs * block_size, Hkv * D]`.
        k_buffers, v_buffers: per layer `[size + page_size, Hkv, D]`, of any strides with the last dimension contiguous.
        k_scale, v_scale: as `commit_kv`; fp8 buffers need them.

    Slot 0 is not written: nobody reads it. Returns error bits `[bs]`, as `commit_kv`.
    """
    shape = (*cache_loc.shape, -1)

    def blocks(rows: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [row.view(*shape[:2], *buffer.shape[1:]) for row, buffer in zip(rows, buffers, strict=True)]

    return commit_kv(
        blocks(rows_k, k_buffers),
        blocks(rows_v, v_buffers),
        list(k_buffers),
        list(v_buffers),
        commit_lens,
        cache_loc,
        first_slot=NULL_SLOT + 1,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def accept(
    candidates: torch.Tensor,
    target_top1: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    stop_ids: torch.Tensor | None = None,
    budget: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accept_lens[bs]` int32, `commit_lens[bs]` int32, `bonus_ids[bs]` int64, `out_tokens[bs, block_size]` int64 and
    `new_seq_lens[bs]` int64 of `candidates[bs, block_size]` (A first) against the target's tokens.

    `out_tokens` has -1 after the commit length, where SGLang leaves rejected candidates. `stop_ids[E]` or `[bs, E]` and
    `budget[bs]` (tokens a request may still emit) end a request inside its block; SGLang has the host look for them.
    """
    if stop_ids is None:
        stop_ids = candidates.new_empty(0)
    if budget is None:
        budget = prefix_lens.new_full((len(candidates),), _ENDLESS, dtype=torch.int64)
    accepted = accept_prefix(candidates, target_top1, stop_ids=stop_ids, budget=budget)
    new_seq_lens = prefix_lens.long() + accepted.commit_len
    return accepted.accept_len, accepted.commit_len, accepted.bonus, accepted.out_tokens, new_seq_lens
