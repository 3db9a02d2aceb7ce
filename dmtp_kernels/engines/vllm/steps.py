"""The three steps of a round that an op of this library or PyTorch can do: head, block, context rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dmtp_kernels.engines.vllm.switches import Switches
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.lm_head import LMHead, key_token, lm_head_select, pack_lm_head
from dmtp_kernels.ops.t1_prep import fused_t1_prep

_SMALL_HEAD = 1 << 20
"""Bytes of a head that stay in the caches, where a screen saves nothing (measured in decode/stack.py)."""

Draw = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""`draw(logits[n, V]) -> (tokens[n], probabilities[n, V] or None)`."""
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Head:
    """Candidates of hidden states: `lm_head_select`, or vLLM's own logits and their argmax or draw."""

    def __init__(self, model: Any, num_valid: int, switches: Switches) -> None:
        self.model, self.num_valid, self.switches = model, num_valid, switches
        self.packed: LMHead | None = None
        if switches.is_on("lm_head_select") or switches.is_on("fused_t1_prep"):
            weight = model.lm_head.weight.detach()[: model.logits_processor.org_vocab_size]
            kind = "int8" if weight.nbytes > _SMALL_HEAD else "dense"
            self.packed = pack_lm_head(weight, format=kind, num_valid=num_valid)

    def sample(self, hidden: torch.Tensor, draw: Draw | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[n]` of `hidden[n, H]`, and the probabilities `[n, V]` that `draw` used."""
        if draw is not None:
            return draw(self.logits(hidden))
        tokens = self.select(hidden)
        return self.logits(hidden).argmax(dim=-1) if tokens is None else tokens, None

    def select(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Greedy tokens `[n]` of `hidden[n, H]` without logits, None where the op is off."""
        if self.packed is None or not self.switches.takes("lm_head_select", hidden, self.packed):
            return None
        return key_token(lm_head_select(hidden, self.packed)[0])[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """vLLM's logits `[n, V]`, -inf for ids that are never produced."""
        logits: torch.Tensor = self.model.compute_logits(hidden)
        logits[:, self.num_valid :] = -torch.inf
        return logits


class Drafted(NamedTuple):
    """Candidates `[B, K]`, and the probabilities `[B, K, V]` that they were drawn with, if they were."""

    tokens: torch.Tensor
    probabilities: torch.Tensor | None


def draft_round(
    model: Any,
    head: Head,
    anchor: torch.Tensor,
    h_mtp: torch.Tensor,
    length: torch.Tensor,
    table: torch.Tensor,
    draw: Draw | None = None,
) -> Drafted:
    """T1 of the MTP states `h_mtp[B, H]`, and what the drafter continues it with.

    `anchor[B]` are the tokens at positions `length[B]`; the drafter's context has `length` rows in the pages
    `table[B, MP]`.
    """
    method = model.method
    t1, embeds, first = _prepare_block(model, head, anchor, h_mtp, draw)
    steps = torch.arange(method.num_slots, device=t1.device)
    positions = length[:, None].long() + (0 if method.block_has_anchor else 1) + steps
    hidden = model.run_drafter(embeds, positions, table, length)[:, method.predicting]
    rest, others = head.sample(hidden.flatten(0, 1), draw)
    batch = len(t1)
    # a row without a token (all logits NaN) proposes one that verification can read
    tokens = torch.cat([t1[:, None], rest.view(batch, -1)], dim=1).clamp(min=0)
    if first is None or others is None:
        return Drafted(tokens, None)
    return Drafted(tokens, torch.cat([first[:, None], others.view(batch, -1, others.shape[-1])], dim=1))


def _prepare_block(
    model: Any, head: Head, anchor: torch.Tensor, h_mtp: torch.Tensor, draw: Draw | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """T1 `[B]`, the block's embeddings `[B, S, H]`, and T1's probabilities `[B, V]` where it was drawn."""
    config, method, switches = model.drafter_config, model.method, head.switches
    embedding = model.model.embed_tokens.weight
    masks = method.num_slots - method.anchors
    options: dict[str, Any] = {"anchors": method.anchors, "mask_id": config.mask_token_id, "num_masks": masks}
    t1, probabilities = None, None
    source = head.packed
    if draw is not None:
        t1, probabilities = head.sample(h_mtp, draw)
        options["t1_override"], source = t1, None
    if switches.takes("fused_t1_prep", anchor, h_mtp, source, embedding, model.fusion, **options):
        chosen, _, embeds, _ = fused_t1_prep(anchor, h_mtp, source, embedding, model.fusion, **options)
        return chosen, embeds, probabilities
    if t1 is None:
        t1, _ = head.sample(h_mtp, None)
    return t1, _block(model, anchor, t1, h_mtp, masks), probabilities


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


def num_valid(model_config: Any) -> int:
    """Ids that the target may produce: what `dmtp export` wrote, else its vocabulary."""
    ours = getattr(model_config.hf_config, "dmtp_config", None) or {}
    count: int = ours.get("num_valid", model_config.get_vocab_size())
    return count
