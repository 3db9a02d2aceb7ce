"""DMTP in vLLM's V2 model runner, which it uses on GPUs: held by contract tests against its interfaces."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from dmtp_kernels.engines.source import DraftSource
from dmtp_kernels.engines.vllm.model import DMTPDraft
from dmtp_kernels.engines.vllm.settings import MARK, OPS, chosen_ops
from dmtp_kernels.engines.vllm.steps import Head, commit_rows, draft_round, num_valid
from dmtp_kernels.engines.vllm.switches import Switches


class DMTPSpeculator(DFlashSpeculator):
    """vLLM makes this in place of its DFlash speculator where the method is `dmtp`; the draft runs eagerly."""

    _speculator_name = "DMTP"
    model: DMTPDraft

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if self.draft_logits is not None:
            raise ValueError("dmtp: draft_sample_method is 'probabilistic', must be 'greedy' in this model runner")
        self.source = DraftSource(**getattr(self.draft_model_config.hf_config, MARK))
        self.switches = Switches(chosen_ops(OPS))

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> DMTPDraft:
        config = self.vllm_config
        model = DMTPDraft(self.source, config, config.model_config.get_total_num_hidden_layers())
        model.model.embed_tokens = target_model.model.embed_tokens
        model.lm_head = target_model.lm_head
        self.head = Head(model, num_valid(config.model_config), self.switches)
        return model

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """None is made: MTP's rows are as many as the target's, in prefills too."""

    def capture(self) -> None:
        """Nothing is captured."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """`[B, K]` candidates; arguments as vLLM's runner gives them, every length and token on the device."""
        batch, count = input_batch.num_reqs, input_batch.num_tokens
        if dummy_run:
            return self.draft_tokens[:batch]
        assert aux_hidden_states is not None
        requests = input_batch.idx_mapping[:batch].long()
        positions = input_batch.positions[:count]
        last = input_batch.query_start_loc[1 : batch + 1].long() - 1 - num_rejected[:batch]
        # inside a prompt the token after the chunk is the prompt's own
        prefill = next_prefill_tokens if next_prefill_tokens.dim() == 1 else next_prefill_tokens[0]
        next_ids = torch.where(num_sampled[:batch] > 0, last_sampled.view(-1)[requests], prefill[requests])
        ids = pad(input_batch.input_ids[1:count], (0, 1))
        ids[last] = next_ids.to(ids.dtype)
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=count,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping={name: slot_mappings[name][:count] for name in self.model.mtp_layers},
        ):
            mtp_hidden = self.model.run_mtp(ids, last_hidden_states[:count], positions)
        features = torch.cat([features[:count] for features in aux_hidden_states], dim=-1)
        pairs = self.model.drafter.context_keys_values(features, positions)
        slots = slot_mappings[self.model.caches[0].layer_name][:count]
        commit_rows(self.switches, pairs, [cache.rows() for cache in self.model.caches], slots)
        table = self.block_tables.input_block_tables[self.draft_kv_cache_group_id][:batch]
        length = positions[last] + 1
        drafted = draft_round(self.model, self.head, next_ids, mtp_hidden[last], length, table)
        self.draft_tokens[:batch] = drafted.tokens
        return self.draft_tokens[:batch]
