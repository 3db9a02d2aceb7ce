"""DMTP in vLLM's V1 model runner: MTP proposes T1, the drafter continues, vLLM schedules, pages and verifies."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from dmtp_kernels.engines.source import DraftSource
from dmtp_kernels.engines.vllm.model import DMTPDraft
from dmtp_kernels.engines.vllm.repairs import repair_sampling
from dmtp_kernels.engines.vllm.settings import MARK, OPS, chosen_ops
from dmtp_kernels.engines.vllm.steps import Draw, Head, commit_rows, draft_round, num_valid
from dmtp_kernels.engines.vllm.switches import Switches


class DMTPProposer(DFlashProposer):
    """vLLM makes this in place of its DFlash proposer where the speculative method is `dmtp`.

    Every step advances MTP and the drafter's context by all rows that the target processed. Rows of rejected candidates
    lie behind the committed ones in pages that the next step writes again before anything reads them.
    """

    model: DMTPDraft

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.source = DraftSource(**getattr(self.draft_model_config.hf_config, MARK))
        self.switches = Switches(chosen_ops(OPS))
        if device.type == "cpu":
            repair_sampling(device)
        self._target_hidden = torch.empty(0)

    def _get_model(self) -> DMTPDraft:
        config = self.vllm_config
        if config.cache_config.cache_dtype != "auto":
            raise ValueError(f"dmtp: kv_cache_dtype is {config.cache_config.cache_dtype!r}, must be 'auto'")
        first = config.model_config.get_total_num_hidden_layers()
        return DMTPDraft(self.source, config, first)

    def load_model(self, target_model: torch.nn.Module) -> None:
        if self.device.type != "cpu" and self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            raise ValueError("dmtp: cudagraph_mode has full graphs, must be PIECEWISE or NONE in this model runner")
        super().load_model(target_model)

        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            # V1 hands the drafter the layers' features alone, MTP reads the state after the final norm
            self._target_hidden = output[0] if isinstance(output, tuple) else output

        target_model.register_forward_hook(keep)
        self.head = Head(self.model, num_valid(self.vllm_config.model_config), self.switches)

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: torch.Tensor, requests: Any, gpu_input_batch: Any, discard_request_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's own, with the prompt's token after the chunk where a chunk ends inside the prompt: MTP's row there
        pairs with it, and vLLM gives the prompt's last one."""
        next_ids, counts = super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )
        for row, ids in enumerate(gpu_input_batch.req_ids):
            request = requests[ids]
            after = int(gpu_input_batch.num_computed_tokens_cpu[row]) + self._scheduled(row)
            if after < request.num_tokens:
                self.backup_next_token_ids.np[row] = request.get_token_id(after)
        count = gpu_input_batch.num_reqs
        self.backup_next_token_ids.copy_to_gpu(count)
        return torch.where(discard_request_mask[:count], self.backup_next_token_ids.gpu[:count], next_ids), counts

    def _scheduled(self, row: int) -> int:
        start = self.runner.query_start_loc.np
        return int(start[row + 1] - start[row])

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """`[B, K]` candidates after the tokens `next_token_ids[B]`; arguments as vLLM's runner gives them."""
        cad, count = common_attn_metadata, target_token_ids.shape[0]
        last, length = cad.query_start_loc[1:] - 1, cad.seq_lens
        if token_indices_to_sample is not None:
            assert num_rejected_tokens_gpu is not None
            last, length = token_indices_to_sample, length - num_rejected_tokens_gpu
        slots = cad.slot_mapping[:count]
        mtp_hidden = self._advance_mtp(target_token_ids, target_positions, next_token_ids, last, slots, cad)
        pairs = self.model.drafter.context_keys_values(target_hidden_states, target_positions)
        commit_rows(self.switches, pairs, [cache.rows() for cache in self.model.caches], slots)
        draw: Draw | None = None
        if self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy:

            def from_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
                return self._sample_from_logits(logits, sampling_metadata)

            draw = from_logits

        drafted = draft_round(
            self.model, self.head, next_token_ids, mtp_hidden[last], length, cad.block_table_tensor, draw
        )
        self._last_draft_probs = drafted.probabilities
        return drafted.tokens[:, :num_speculative_tokens]

    def _advance_mtp(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        next_ids: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
        cad: CommonAttentionMetadata,
    ) -> torch.Tensor:
        """MTP over every row the target processed, each with the token after it."""
        ids = pad(token_ids[1:], (0, 1))
        ids[last] = next_ids.to(ids.dtype)
        _, metadata = SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata(self, cad)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=len(ids),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping={name: slots for name in self.model.mtp_layers},
        ):
            return self.model.run_mtp(ids, self._target_hidden[: len(ids)], positions)

    def dummy_run(self, *arguments: Any, **keywords: Any) -> None:
        """Nothing: there is no graph to capture and no collective to join."""
