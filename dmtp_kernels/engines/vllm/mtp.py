"""Ops of this library inside vLLM's own MTP proposer, one by one."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.spec_decode.eagle import EagleProposer

from dmtp_kernels.engines.vllm.settings import chosen_ops
from dmtp_kernels.engines.vllm.steps import Head
from dmtp_kernels.engines.vllm.switches import Switches
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep

_MODULES = ("ExaoneMoeMTP", "Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP")
"""vLLM's modules that project [norm of the embedding; norm of the hidden state] and run one layer and a norm."""


class FusedMTPProposer(EagleProposer):
    """vLLM makes this in place of its MTP proposer where `DMTP_VLLM_OPS` lists an op.

    Text and candidates are those of vLLM's own but for rounding.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.switches = Switches(chosen_ops(()))
        self.head: Head | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.switches.decide("commit_kv", "MTP's attention writes its rows itself, at the target's slots")
        reason = self._head_reason()
        if reason is None:
            self.head = Head(self.model, self.vllm_config.model_config.get_vocab_size(), self.switches)
        else:
            self.switches.decide("lm_head_select", reason)
        reason = self._input_reason()
        if reason is not None:
            self.switches.decide("fused_t1_prep", reason)
        elif self.switches.is_on("fused_t1_prep"):
            most = self.vllm_config.scheduler_config.max_num_seqs * (1 + self.num_speculative_tokens)
            fuse_input(self.model.model, self.switches, most)

    def _head_reason(self) -> str | None:
        size = self.vllm_config.parallel_config.tensor_parallel_size
        if size > 1:
            return f"tensor_parallel_size is {size}, the head is sharded"
        if self.use_heterogeneous_vocab:
            return "the drafter has a vocabulary of its own"
        if not hasattr(self.model, "lm_head") or not hasattr(self.model, "logits_processor"):
            return f"{type(self.model).__name__} has a head for each step"
        weight = getattr(self.model.lm_head, "weight", None)
        if weight is None or weight.dtype != self.dtype:
            return "the head is quantised"
        return None

    def _input_reason(self) -> str | None:
        parallel = self.vllm_config.parallel_config
        if type(self.model).__name__ not in _MODULES:
            return f"{type(self.model).__name__} is not one of {', '.join(_MODULES)}"
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(parallel, name) > 1:
                return f"{name} is {getattr(parallel, name)}, must be 1"
        if self.compilation_config.mode != CompilationMode.NONE:
            return "the module is compiled"
        if not isinstance(self.model.model.fc.quant_method, UnquantizedLinearMethod):
            return "the projection is quantised"
        return None

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = None if self.head is None else self.head.select(hidden_states)
        return super()._greedy_sample(hidden_states) if tokens is None else tokens


def fuse_input(module: Any, switches: Switches, most: int) -> None:
    """Put `fused_t1_prep` in place of a module's look-up, two norms, concatenation and projection.

    It is the op's fusion in the mode `replace`, of a block that is the token alone. Chunks of a prompt, more than
    `most` rows, are left to the module's own GEMM.
    """
    fusion = Fusion(
        mode="replace",
        weight=_projection(module.fc, module.embed_tokens.weight),
        norm_e=module.pre_fc_norm_embedding.weight.detach(),
        norm_m=module.pre_fc_norm_hidden.weight.detach(),
        eps_e=module.pre_fc_norm_embedding.variance_epsilon,
        eps_m=module.pre_fc_norm_hidden.variance_epsilon,
        offset_e=_offset(module.pre_fc_norm_embedding),
        offset_m=_offset(module.pre_fc_norm_hidden),
    )
    original = module.forward

    def forward(
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        def as_it_was() -> torch.Tensor:
            made: torch.Tensor = original(
                input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx
            )
            return made

        count = len(hidden_states)
        if count > most:
            return as_it_was()
        table, ids = module.embed_tokens.weight, input_ids
        if inputs_embeds is not None:  # of a model with images, looked up before
            table, ids = inputs_embeds, torch.arange(count, device=inputs_embeds.device)
        if ids is None:
            return as_it_was()
        options: dict[str, Any] = {"anchors": 1, "num_masks": 0, "mask_id": 0, "t1_override": ids}
        if not switches.takes("fused_t1_prep", ids, hidden_states, None, table, fusion, **options):
            return as_it_was()
        rows = fused_t1_prep(ids, hidden_states, None, table, fusion, **options)[2][:, 0]
        layer = module.layers[spec_step_idx % module.num_mtp_layers]
        out, residual = layer(positions=positions, hidden_states=rows, residual=None)
        normed: torch.Tensor = module.norm(out, residual)[0]
        return normed

    module.forward = forward


def _projection(fc: Any, like: torch.Tensor) -> torch.Tensor:
    """Weight `[H, 2 H]` of a linear layer; vLLM packs it on CPUs and drops the original."""
    if fc.weight.numel():
        weight: torch.Tensor = fc.weight.detach()
        return weight
    width = fc.input_size
    columns = [fc(rows) for rows in torch.eye(width, dtype=like.dtype, device=like.device).split(1024)]
    return torch.cat(columns).T.contiguous()


def _offset(norm: Any) -> float:
    return 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0
