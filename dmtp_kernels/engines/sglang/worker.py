"""DMTP rounds over SGLang's DFLASH worker: T1 and its fusion before the draft forward, MTP after the target's.

Nothing here imports SGLang. Verification, the drafter's KV, graphs and scheduling stay SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.decode.stack import op_fusion
from dmtp_kernels.engines.sglang import tensors
from dmtp_kernels.engines.sglang.draft import MTPDraft
from dmtp_kernels.engines.source import DraftSource, draft_source
from dmtp_kernels.models.formats import read_dmtp, read_mtp
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep


def source_of(server_args: Any) -> DraftSource:
    """Drafter, MTP and method of a server's arguments; MTP is `mtp` beside the drafter, else in the target's directory.

    Raises:
        ValueError: no DMTP drafter, or one whose block is not as wide as a verification.
    """
    source = draft_source({"model": server_args.speculative_draft_model_path}, server_args.model_path)
    if source.rounds.anchors != 2:
        raise ValueError(
            f"dmtp: {source.drafter} is for the method {source.method!r}, must be one whose block starts with A and "
            "T1: SGLang drafts and verifies blocks of one width"
        )
    return source


class DMTPRounds:
    """Goes before SGLang's `DFlashWorkerV2` among a worker's bases."""

    mtp_draft: MTPDraft
    _t1: torch.Tensor

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)  # type: ignore[call-arg]
        worker: Any = self
        if worker._target_logits_processor is None:
            raise ValueError(
                "dmtp: the target must have exactly one LogitsProcessor, which keeps its last hidden states"
            )
        # beside the drafter's features, before graphs are captured
        worker._target_logits_processor.keep_last_hidden_states = True
        self.source = source_of(server_args)
        runner = worker.draft_model_runner
        self._run_drafter, runner.forward = runner.forward, self._draft

    def alloc_memory_pool(self, *arguments: Any, **keywords: Any) -> None:
        super().alloc_memory_pool(*arguments, **keywords)  # type: ignore[misc]
        worker: Any = self
        runner = worker.model_runner
        embedding, head = runner.model.get_input_embeddings().weight, runner.model.lm_head
        shard = getattr(head, "shard_indices", None)
        mtp = read_mtp(self.source.mtp, dtype=embedding.dtype).to(embedding.device)
        fusion = read_dmtp(self.source.drafter, dtype=embedding.dtype).fusion
        pool = runner.token_to_kv_pool
        self.mtp_draft = MTPDraft(
            mtp,
            tensors.head_of(head.weight.detach(), num_org=None if shard is None else int(shard.num_org_elements)),
            embedding.detach(),
            Fusion(mode="none") if fusion is None else op_fusion(fusion.to(embedding.device)),
            num_slots=pool.size + pool.page_size,
            page_size=worker.page_size,
            max_reqs=len(runner.req_to_token_pool.req_to_token),
            block_size=int(worker.block_size),
            mask_token_id=int(worker._mask_token_id),
        )

    def _draft(self, forward_batch: Any, *arguments: Any, **keywords: Any) -> Any:
        """The draft forward, over `[A, T1, MASK...]` in place of `[A, MASK...]`."""
        worker: Any = self
        draft, slots = self.mtp_draft, int(worker.block_size)
        _, ids, embeds, _ = fused_t1_prep(
            forward_batch.input_ids.view(-1, slots)[:, 0].contiguous(),
            draft.hidden[forward_batch.req_pool_indices],
            draft.head,
            draft.embedding,
            draft.fusion,
            mask_id=draft.mask_token_id,
            num_masks=slots - 2,
            embed_scale=worker._noise_embed_scale,
        )
        ids = torch.where(ids < 0, draft.mask_token_id, ids)
        self._t1 = ids[:, 1]
        forward_batch.input_ids, forward_batch.input_embeds = ids.flatten(), embeds.flatten(0, 1)
        out = self._run_drafter(forward_batch, *arguments, **keywords)
        if worker._draft_sampler is not None:  # a graph has put the drafter's own guess there
            worker._draft_sampler.out[: len(ids) * (slots - 1)].view(-1, slots - 1)[:, 0] = self._t1
        return out

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, chunk_size: int = 256
    ) -> torch.Tensor:
        """T1, then the tokens of the slots after it, of the hidden states of slots 1 and on."""
        rows = hidden_states.view(len(self._t1), -1, hidden_states.shape[-1])[:, 1:]
        drafted = tensors.select(rows.flatten(0, 1), self.mtp_draft.head).view(len(self._t1), -1)
        # a row without a number proposes id 0
        return torch.cat([self._t1[:, None], drafted.clamp(min=0)], dim=1).flatten()

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        prompts = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        lens, ids = batch.seq_lens, batch.input_ids
        out = super().forward_batch_generation(  # type: ignore[misc]
            batch, on_publish=on_publish, grammar_barrier=grammar_barrier, pp_proxy_tensors=pp_proxy_tensors
        )
        logits = out.logits_output
        if logits is None or not len(lens):
            return out
        hidden, logits.last_hidden_states = logits.last_hidden_states, None
        if hidden is None:
            raise RuntimeError("dmtp: the target returned no last hidden states")
        with torch.inference_mode():
            if prompts:
                self._read_prompts(batch, ids, hidden, out.next_token_ids)
            else:
                shape = (len(lens), int(self.block_size))  # type: ignore[attr-defined]
                self._advance(
                    out.next_token_ids.view(shape),
                    hidden.view(*shape, -1),
                    lens,
                    out.accept_lens,
                    batch.req_pool_indices,
                )
        return out

    def _read_prompts(self, batch: Any, ids: torch.Tensor, hidden: torch.Tensor, drawn: torch.Tensor) -> None:
        """MTP over a prefill's rows; where a chunk ends inside a prompt the last one takes the prompt's next token."""
        first = 0
        for i, request in enumerate(batch.reqs):
            start, count = int(batch.prefix_lens[i]), int(batch.extend_lens[i])
            rows, text = slice(first, first + count), request.full_untruncated_fill_ids
            first += count
            if not count:
                continue
            known = start + count < len(text)
            last = drawn.new_tensor([text[start + count]]) if known else drawn[i : i + 1]
            tokens = torch.cat([ids[rows][1:].to(drawn.dtype), last])
            self._advance(
                tokens[None],
                hidden[rows][None],
                drawn.new_tensor([start]),
                drawn.new_tensor([count]),
                batch.req_pool_indices[i : i + 1],
            )

    def _advance(
        self, tokens: torch.Tensor, hidden: torch.Tensor, lens: torch.Tensor, commits: torch.Tensor, pool: torch.Tensor
    ) -> None:
        table = self.model_runner.req_to_token_pool.req_to_token  # type: ignore[attr-defined]
        self.mtp_draft.advance(tokens, hidden, lens, commits, pool, table)
