"""The three steps of a round that an op of this library or PyTorch can do: head, block, context rows."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.engines.vllm.switches import Switches
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.lm_head import key_token, lm_head_select, pack_lm_head
from dmtp_kernels.ops.t1_prep import fused_t1_prep

_SMALL_HEAD = 1 << 20
"""Bytes of a head that stay in the caches, where a screen saves nothing (measured in decode/stack.py)."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Head:
    """Candidates of hidden states: `lm_head_select`, or vLLM's own logits and their argmax or draw."""

    def __init__(self, model: Any, num_valid: int, switches: Switches) -> None:
        self.model, self.num_valid, self.switches = model, num_valid, switches
        weight = model.lm_head.weight.detach()[: model.logits_processor.org_vocab_size]
        self.packed = pack_lm_head(
            weight, format="int8" if weight.nbytes > _SMALL_HEAD else "dense", num_valid=num_valid
        )

    def sample(self, proposer: Any, hidden: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[n]` of `hidden[n, H]`, and the probabilities `[n, V]` that they were drawn with, if they were."""
        if proposer._enable_probabilistic_draft_probs and not sampling.all_greedy:
            return proposer._sample_from_logits(self.logits(hidden), sampling)
        tokens = self.select(hidden)
        return self.logits(hidden).argmax(dim=-1) if tokens is None else tokens, None

    def select(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Greedy tokens `[n]` of `hidden[n, H]` without logits, None where the op is off."""
        if not self.switches.takes("lm_head_select", hidden, self.packed):
            return None
        return key_token(lm_head_select(hidden, self.packed)[0])[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """vLLM's logits `[n, V]`, -inf for ids that are never produced."""
        logits = self.model.compute_logits(hidden)
        logits[:, self.num_valid :] = -torch.inf
        return logits


def prepare_block(
    proposer: Any, anchor: torch.Tensor, h_mtp: torch.Tensor, sampling: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """T1 `[B]`, the block's embeddings `[B, S, H]`, and T1's probabilities `[B, V]` where it was drawn."""
    model, head, switches = proposer.model, proposer.head, proposer.switches
    config, method = model.drafter_config, model.method
    embedding = model.model.embed_tokens.weight
    masks = method.num_slots - method.anchors
    options: dict[str, Any] = {"anchors": method.anchors, "mask_id": config.mask_token_id, "num_masks": masks}
    drawn = proposer._enable_probabilistic_draft_probs and not sampling.all_greedy
    if not drawn and switches.takes("fused_t1_prep", anchor, h_mtp, head.packed, embedding, model.fusion, **options):
        t1, _, embeds, _ = fused_t1_prep(anchor, h_mtp, head.packed, embedding, model.fusion, **options)
        return t1, embeds, None
    t1, probs = head.sample(proposer, h_mtp, sampling)
    if drawn and switches.takes(
        "fused_t1_prep", anchor, h_mtp, None, embedding, model.fusion, t1_override=t1, **options
    ):
        embeds = fused_t1_prep(anchor, h_mtp, None, embedding, model.fusion, t1_override=t1, **options)[2]
        return t1, embeds, probs
    return t1, _block(model, anchor, t1, h_mtp, masks), probs


def _block(model: Any, anchor: torch.Tensor, t1: torch.Tensor, h_mtp: torch.Tensor, masks: int) -> torch.Tensor:
    """The block's embeddings in PyTorch, its ids looked up by vLLM's own layer."""
    method, fusion = model.method, model.fusion_module
    mask = torch.full((len(t1), masks), model.drafter_config.mask_token_id, device=t1.device)
    known = [anchor.long(), t1] if method.anchors == 2 else [t1]
    embeds = model.model.embed_tokens(torch.cat([torch.stack(known, dim=1), mask], dim=1))
    if fusion is None:
        return embeds
    slot = method.anchors - 1
    fused = fusion(embeds[:, slot], h_mtp)
    if fusion.mode == "mask_residual":
        embeds[:, method.anchors :] += fused[:, None]
    elif fusion.mode == "replace":
        embeds[:, slot] = fused
    else:
        embeds[:, slot] += fused
    return embeds


def commit_rows(switches: Switches, rows: Pairs, caches: Pairs, slots: torch.Tensor) -> None:
    """Write context rows, per layer K and V `[T, Hkv, D]`, to `slots[T]` of caches `[pages, P, Hkv, D]`; a negative
    slot skips its row."""
    keys, values = ([pair[i][None] for pair in rows] for i in (0, 1))
    into_k, into_v = ([pair[i] for pair in caches] for i in (0, 1))
    valid = torch.full((1,), len(slots), dtype=torch.int64, device=slots.device)
    page_size = into_k[0].shape[1]  # page 0 is vLLM's null page
    if switches.takes("commit_kv", keys, values, into_k, into_v, valid, slots[None], first_slot=page_size):
        commit_kv(keys, values, into_k, into_v, valid, slots[None], first_slot=page_size)
        return
    kept = slots >= page_size
    at = slots[kept]
    for (k, v), (k_cache, v_cache) in zip(rows, caches, strict=True):
        k_cache[at // page_size, at % page_size] = k[kept]
        v_cache[at // page_size, at % page_size] = v[kept]


def commit_context(
    switches: Switches, model: Any, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> bool:
    """Norm, rotate and write the context rows of a DFlash model of vLLM in one call over all its layers.

    Takes the place of the end of its `precompute_and_store_context_kv`, of the projection on. False where the op is
    off; then nothing was written.
    """
    count, layers, heads, size = len(slots), model._num_attn_layers, model._num_kv_heads, model._head_dim
    if not switches.is_on("commit_kv"):
        return False
    k, v = model._project_context_kv(states, count, layers, heads, size)  # [L, T, Hkv, D] each
    scale = getattr(model.layers[0].self_attn, "v_scale", None)
    if scale is not None:
        v = v * scale
    views = [attention.kv_cache.transpose(1, 2).split(size, dim=-1) for attention in model._attn_layers]
    arguments = (
        [rows[None] for rows in k],
        [rows[None] for rows in v],
        [view[0] for view in views],
        [view[1] for view in views],
        torch.full((1,), count, dtype=torch.int64, device=slots.device),
        slots[None],
    )
    options: dict[str, Any] = {
        "first_slot": views[0][0].shape[1],
        "k_norm": list(model._k_norm_weights),
        "k_norm_eps": model._rms_norm_eps,
        "cos_sin": model._rope_cos_sin_cache,
        "positions": positions[None],
    }
    if not switches.takes("commit_kv", *arguments, **options):
        return False
    commit_kv(*arguments, **options)
    return True
