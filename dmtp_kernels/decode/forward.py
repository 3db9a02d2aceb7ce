"""The three models' forward passes over paged caches. Each returns its new rows; none writes a cache."""

from __future__ import annotations

import torch

from dmtp_kernels.decode.caches import PagedCache
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.work import MTPPass, Rows, TargetPass
from dmtp_kernels.models.config import DrafterConfig
from dmtp_kernels.models.layers import Attend
from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.draft_pages import draft_page_table


def causal_attend(
    cache: PagedCache, table: torch.Tensor, ctx_len: torch.Tensor, rows: Rows, tail: torch.Tensor | None = None
) -> Attend:
    """Attention of new rows to `ctx_len[B]` cached rows, to the cached rows in slots `tail[B, n]`, and causally to
    themselves.

    The new rows are appended to `rows`.
    """
    if tail is not None:
        # inert rows have no slots of their own, and may have anything
        tail = tail.clamp(0, len(cache.flat_k[0]) - 1)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows.k.append(k)
        rows.v.append(v)
        if tail is not None:
            k = torch.cat([cache.flat_k[layer][tail], k], dim=1)
            v = torch.cat([cache.flat_v[layer][tail], v], dim=1)
        return block_attention(
            q, cache.k[layer], cache.v[layer], table, ctx_len, block_k=k, block_v=v, block_causal=True
        )[0]

    return attend


def run_target(
    stack: Stack, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, ctx_len: torch.Tensor
) -> TargetPass:
    """Target over `ids[B, T]` at `positions[B, T]`, after `ctx_len[B]` cached rows."""
    rows = Rows([], [])
    layers = stack.drafter.config.target_layers if stack.drafter is not None else ()
    attend = causal_attend(stack.target_cache, table, ctx_len, rows)
    output = stack.target(ids, positions, attend, layers)
    return TargetPass(output.hidden, output.features, rows)


def run_mtp(
    stack: Stack,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    ctx_len: torch.Tensor,
    tail: torch.Tensor | None,
) -> MTPPass:
    """MTP rows (token of position p+1, target hidden of position p) at `positions[B, T]` = p."""
    assert stack.mtp is not None and stack.mtp_cache is not None
    rows = Rows([], [])
    attend = causal_attend(stack.mtp_cache, table, ctx_len, rows, tail)
    embeds = stack.target.embed_tokens(tokens.clamp(0, stack.target.config.vocab_size - 1))
    return MTPPass(stack.mtp(embeds, hidden, positions, attend), rows)


def run_drafter(
    stack: Stack, embeds: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, ctx_len: torch.Tensor
) -> torch.Tensor:
    """Drafter hidden `[B, S, H]` of one block."""
    assert stack.drafter is not None and stack.drafter_cache is not None
    attend = drafter_attend(stack.drafter.config, stack.drafter_cache, table, ctx_len)
    return stack.drafter(embeds, positions, attend)


def drafter_attend(config: DrafterConfig, cache: PagedCache, table: torch.Tensor, ctx_len: torch.Tensor) -> Attend:
    """Attention of a block to `ctx_len[B]` cached context rows and itself, as the drafter's rules have it.

    One window for all layers is a temporary page table, no row moves; rules of single layers are masks over the whole
    table.
    """
    skip = None
    if config.window is not None:
        window = min(config.window, table.shape[1] * cache.page_size)
        table, ctx_len, skip = draft_page_table(table, ctx_len, window=window, page_size=cache.page_size)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not config.layer_masks:
            return block_attention(
                q, cache.k[layer], cache.v[layer], table, ctx_len, block_k=k, block_v=v, valid_from=skip
            )[0]
        rule = config.layer_masks[layer]
        return block_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            table,
            ctx_len,
            block_k=k,
            block_v=v,
            window=rule.window,
            window_ref=rule.window_ref,
            block_causal=rule.causal,
        )[0]

    return attend


def drafter_context(
    stack: Stack, features: torch.Tensor, mtp_hidden: torch.Tensor | None, positions: torch.Tensor
) -> Rows:
    """The drafter's context rows of target `features[B, T, F]` and, where it reads them, aligned MTP states `[B, T,
    H]`."""
    assert stack.drafter is not None
    config = stack.drafter.config
    streams = [features] if config.use_target_features else []
    if config.use_mtp_features:
        assert mtp_hidden is not None
        streams.append(mtp_hidden)
    pairs = stack.drafter.context_keys_values(torch.cat(streams, dim=-1), positions)
    return Rows([k for k, _ in pairs], [v for _, v in pairs])


def store(cache: PagedCache, rows: Rows, valid: torch.Tensor, slots: torch.Tensor) -> None:
    """Commit rows 0..valid[b]-1 of every layer to `slots[B, T]`."""
    commit_kv(rows.k, rows.v, cache.flat_k, cache.flat_v, valid, slots)
