"""Ops of this library inside vLLM's own DFlash proposer, one by one."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.spec_decode.dflash import DFlashProposer

from dmtp_kernels.engines.vllm.settings import chosen_ops
from dmtp_kernels.engines.vllm.steps import Head, commit_context
from dmtp_kernels.engines.vllm.switches import Switches
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep

_PACKED_CACHES = ("FLASH_ATTN",)
"""Attention backends whose caches are `[pages, Hkv, P, 2 D]`, K before V in a row."""


class FusedDFlashProposer(DFlashProposer):
    """vLLM makes this in place of its DFlash proposer where `DMTP_VLLM_OPS` lists an op.

    Text and candidates are those of vLLM's own but for rounding.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.switches = Switches(chosen_ops(()))
        self.head: Head | None = None
        self._plain = Fusion(mode="none")

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        size = self.vllm_config.parallel_config.tensor_parallel_size
        for op in ("lm_head_select", "fused_t1_prep") if size > 1 else ():
            self.switches.decide(op, f"tensor_parallel_size is {size}, the table is sharded")
        if getattr(self.model, "draft_id_to_target_id", None) is not None:
            self.switches.decide("lm_head_select", "the drafter has a vocabulary of its own")
        elif not hasattr(self.model.lm_head, "weight") or not self.model.lm_head.weight.is_floating_point():
            self.switches.decide("lm_head_select", "the head is quantised")
        elif size == 1:
            self.head = Head(self.model, self.vllm_config.model_config.get_vocab_size(), self.switches)
        reason = cache_reason(self.model.model, self.vllm_config.cache_config.cache_dtype)
        if reason is not None:
            self.switches.decide("commit_kv", reason)

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.head is not None:
            tokens = self.head.select(hidden_states)
            if tokens is not None:
                return tokens
        return super()._greedy_sample(hidden_states)

    def build_model_inputs_first_pass(
        self, num_tokens: int, num_input_tokens: int, mm_embed_inputs: Any
    ) -> tuple[dict[str, Any], int]:
        model, count = self.model.model, self._dflash_num_context
        context = self._context_positions_buffer[:count], self._context_slot_mapping_buffer[:count]
        if not commit_context(self.switches, model, self._dflash_hidden_states, *context):
            self.model.precompute_and_store_context_kv(self._dflash_hidden_states, *context)
        inputs = {
            "input_ids": self.input_ids[:num_input_tokens],
            "positions": self._get_positions(num_input_tokens),
            "inputs_embeds": self._block(num_tokens) if num_tokens == num_input_tokens else None,
        }
        return inputs, num_input_tokens

    def _block(self, num_tokens: int) -> torch.Tensor | None:
        """Embeddings `[B * S, H]` of the blocks `[A, MASK...]`, in which A takes T1's place."""
        model, slots = self.model.model, 1 + self.num_speculative_tokens
        anchors = self.input_ids[:num_tokens:slots].contiguous()
        weight = model.embed_tokens.weight
        options: dict[str, Any] = {
            "anchors": 1,
            "num_masks": slots - 1,
            "mask_id": self.parallel_drafting_token_id,
            "mask_embed": model.mask_embedding.to(weight.dtype) if model.has_separate_mask_embedding else None,
            "t1_override": anchors,
        }
        unread = weight[: len(anchors)]
        if not self.switches.takes("fused_t1_prep", anchors, unread, None, weight, self._plain, **options):
            return None
        return fused_t1_prep(anchors, unread, None, weight, self._plain, **options)[2].flatten(0, 1)


def cache_reason(model: Any, cache_dtype: str) -> str | None:
    """Why `commit_kv` cannot write the caches of a DFlash model of vLLM, or None when it can."""
    names = {layer.self_attn.attn.get_attn_backend().get_name() for layer in model.layers}
    other = sorted(names - set(_PACKED_CACHES))
    if other:
        return f"{other[0]} lays its caches out in a way of its own"
    if cache_dtype != "auto":
        return f"kv_cache_dtype is {cache_dtype!r}"
    if getattr(model, "_fused_kv_weight", None) is None:
        return "the projection of K and V is quantised"
    if not model._rope_is_neox:
        return "RoPE is interleaved"
    return None
