"""MTP, drafter and fusion of a DMTP checkpoint over vLLM's paged caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dmtp_kernels.decode.stack import op_fusion
from dmtp_kernels.engines.source import DraftSource
from dmtp_kernels.models.config import LayerConfig
from dmtp_kernels.models.formats import read_dmtp, read_mtp
from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.draft_pages import draft_page_table
from dmtp_kernels.ops.t1_prep import Fusion


class DraftCache(AttentionLayerBase):
    """Pages of one drafter layer: context rows alone, which the drafter's own attention reads.

    vLLM allocates and hands out the pages, with those of the target; a window that counts from the anchor is none of
    its own, so the rows behind it are kept.
    """

    def __init__(self, layer: LayerConfig, name: str, config: VllmConfig) -> None:
        self.num_heads, self.layer_name = layer.num_heads, name
        self._layer, self._dtype = layer, config.model_config.dtype
        self.kv_cache = torch.empty(0)
        config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> Any:
        return CacheOnlyAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        layer = self._layer
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_dim,
            head_size_v=layer.head_dim,
            dtype=self._dtype,
        )

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[pages, P, Hkv, D]`, views of the pages `[pages, Hkv, P, 2 D]`."""
        k, v = self.kv_cache.transpose(1, 2).split(self._layer.head_dim, dim=-1)
        return k, v


class _Shared(nn.Module):
    """Where vLLM puts the target's embedding."""

    embed_tokens: nn.Module


class DMTPDraft(nn.Module):
    """The draft model. vLLM gives it the target's embedding (`model.embed_tokens`) and head (`lm_head`).

    `first_layer` numbers its caches from the target's last one on.
    """

    lm_head: nn.Module

    def __init__(self, source: DraftSource, config: VllmConfig, first_layer: int) -> None:
        super().__init__()
        model_config = config.model_config
        read = read_dmtp(source.drafter, dtype=model_config.dtype)
        mtp = read_mtp(source.mtp, dtype=model_config.dtype)
        self.method = source.rounds
        self.model = _Shared()
        self.drafter, self.mtp, self.fusion_module = read.dflash.drafter, mtp, read.fusion
        self.drafter_config = self.drafter.config
        self.to(config.device_config.device)
        self.fusion = Fusion(mode="none") if read.fusion is None else op_fusion(read.fusion)
        self.caches = [
            DraftCache(self.drafter_config.layer, f"dmtp.drafter.layers.{first_layer + i}.attn", config)
            for i in range(self.drafter_config.num_layers)
        ]
        layer, after = mtp.config.layer, first_layer + self.drafter_config.num_layers
        with set_current_vllm_config(config):
            attention = [
                Attention(
                    layer.num_heads,
                    layer.head_dim,
                    layer.head_dim**-0.5,
                    num_kv_heads=layer.num_kv_heads,
                    cache_config=config.cache_config,
                    prefix=f"dmtp.mtp.layers.{after + i}.attn",
                )
                for i in range(mtp.config.num_layers)
            ]
        for module in attention:
            module.process_weights_after_loading(model_config.dtype)
        self.mtp_attention = nn.ModuleList(attention)
        self.mtp_layers: list[str] = [module.layer_name for module in attention]
        self.logits_processor = LogitsProcessor(model_config.get_vocab_size())

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, V]` logits of `hidden[n, H]` by vLLM's own head."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden)
        return logits

    def run_mtp(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """MTP's output `[T, H]` at `positions[T]` = p, of the tokens `ids[T]` at p+1 and the target's `hidden[T, H]` of
        p; runs in a forward context of vLLM."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen: torch.Tensor = self.mtp_attention[layer](q.flatten(1), k.flatten(1), v.flatten(1))
            return seen.view(q.shape)

        out: torch.Tensor = self.mtp(self.model.embed_tokens(ids), hidden, positions, attend)
        return out

    def run_drafter(
        self, embeds: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, ctx_len: torch.Tensor
    ) -> torch.Tensor:
        """The drafter's hidden `[B, S, H]` of blocks `embeds[B, S, H]` at `positions[B, S]`, after `ctx_len[B]` rows in
        the pages `table[B, MP]`."""
        config, page_size, skip = self.drafter_config, self.caches[0].kv_cache.shape[2], None
        if config.window is not None:
            window = min(config.window, table.shape[1] * page_size)
            table, ctx_len, skip = draft_page_table(table, ctx_len, window=window, page_size=page_size)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rules: dict[str, Any] = {"valid_from": skip}
            if config.layer_masks:
                rule = config.layer_masks[layer]
                rules = {"window": rule.window, "window_ref": rule.window_ref, "block_causal": rule.causal}
            return block_attention(q, *self.caches[layer].rows(), table, ctx_len, block_k=k, block_v=v, **rules).out

        out: torch.Tensor = self.drafter(embeds, positions, attend)
        return out
