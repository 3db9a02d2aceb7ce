"""The MTP module on SGLang's slots: T1 of a round, and its rows of the committed tokens."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.engines.sglang import tensors
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.draft_pages import draft_page_table_from_slots
from dmtp_kernels.ops.lm_head import LMHead
from dmtp_kernels.ops.t1_prep import Fusion


class MTPDraft:
    """MTP's keys and values live in slots of the target's pool, its last hidden state under the request's pool index.

    As in SGLang's own MTP, row p (the token of position p + 1, the target's hidden of p) lies in the slot of position
    p. After a commit it has as many rows as the target and needs no slots of its own: rows of rejected candidates are
    not written.

    Args:
        mtp: the module, on the pool's device and in its dtype.
        head, embedding: the target's, this rank's shard and the whole table `[V, H]`.
        fusion: what T1's embedding gets.
        num_slots, page_size: of the target's pool, `size + page_size` slots.
        max_reqs: rows of `req_to_token`.
        group: ranks that the head is cut over.
    """

    def __init__(
        self,
        mtp: MTP,
        head: LMHead,
        embedding: torch.Tensor,
        fusion: Fusion,
        *,
        num_slots: int,
        page_size: int,
        max_reqs: int,
        block_size: int,
        mask_token_id: int,
        group: Any = None,
    ) -> None:
        self.mtp, self.head, self.embedding, self.fusion, self.group = mtp, head, embedding, fusion, group
        self.page_size, self.block_size, self.mask_token_id = page_size, block_size, mask_token_id
        layer = mtp.config.layer
        shape = (mtp.config.num_layers, num_slots, layer.num_kv_heads, layer.head_dim)
        # slot 0 is read by padded rows: nothing may be NaN there
        self.k = embedding.new_zeros(shape)
        self.v = embedding.new_zeros(shape)
        self.hidden = embedding.new_zeros(max_reqs, embedding.shape[1])

    def block(
        self,
        bonus_tokens: torch.Tensor,
        prefix_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
        t1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`tensors.prepare_block` of the requests, T1 by the head or as given."""
        return tensors.prepare_block(
            bonus_tokens,
            prefix_lens,
            req_pool_indices,
            req_to_token,
            self.hidden[req_pool_indices],
            None if t1 is not None else self.head,
            self.embedding,
            self.fusion,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            t1=t1,
            group=self.group,
        )

    def advance(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        prefix_lens: torch.Tensor,
        commit_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> None:
        """Run rows j = (token of position `prefix_lens + j + 1`, target hidden of `prefix_lens + j`), keep the first
        `commit_lens`.

        Args:
            tokens: `[bs, R]` emitted tokens, -1 after them; in prefill the prompt from its second token on and the
                token drawn from it.
            hidden: `[bs, R, H]` of the target, after its final norm.
            prefix_lens, commit_lens: `[bs]`; a row that commits nothing leaves no trace.
        """
        rows = tokens.shape[1]
        offsets = torch.arange(rows, device=tokens.device)
        positions = prefix_lens.long()[:, None] + offsets
        history = draft_page_table_from_slots(
            req_to_token,
            prefix_lens,
            window=req_to_token.shape[1],
            page_size=self.page_size,
            req_pool_indices=req_pool_indices,
        )
        rows_k: list[torch.Tensor] = []
        rows_v: list[torch.Tensor] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows_k.append(k)
            rows_v.append(v)
            pages_k, pages_v = (cache[layer].unflatten(0, (-1, self.page_size)) for cache in (self.k, self.v))
            return block_attention(
                q,
                pages_k,
                pages_v,
                history.draft_table,
                history.draft_len,
                block_k=k,
                block_v=v,
                block_causal=True,
            )[0]

        embeds = self.embedding[tokens.clamp(0, len(self.embedding) - 1)]
        predicted = self.mtp(embeds, hidden, positions, attend)
        slots = tensors.slots_of(req_to_token, req_pool_indices, positions, commit_lens)
        tensors.commit(rows_k, rows_v, list(self.k), list(self.v), slots, commit_lens)
        picked = predicted[torch.arange(len(tokens), device=tokens.device), (commit_lens.long() - 1).clamp(min=0)]
        keep = (commit_lens > 0)[:, None]
        self.hidden[req_pool_indices] = torch.where(keep, picked, self.hidden[req_pool_indices])
