"""Ops in place of what SGLang's DFLASH worker runs, one by one. Nothing here imports SGLang.

A hook is called as SGLang's `HookRegistry` calls an AROUND hook: `hook(original, *args, **kwargs)`. At its first call
it asks `supports`; an op that refuses is left to SGLang for good, with one line in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels import supports
from dmtp_kernels.engines.sglang import tensors

logger = logging.getLogger("sglang.dmtp_kernels")

VARIABLE = "DMTP_SGLANG_OPS"
_WORKER = "sglang.srt.speculative.dflash_worker_v2"
_ENDLESS = 1 << 40


def chosen() -> tuple[str, ...]:
    """The ops that `DMTP_SGLANG_OPS` lists; none where it is not set.

    Raises:
        ValueError: it names what is not one of `HOOKS`.
    """
    names = tuple(name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip())
    unknown = [name for name in names if name not in HOOKS]
    if unknown:
        raise ValueError(f"{VARIABLE}: names {', '.join(unknown)}, must list some of {', '.join(HOOKS)}")
    return names


class Switch:
    """Whether one op runs; decided at its first call."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.on: bool | None = None

    def takes(self, reason: Callable[[], str | None]) -> bool:
        """Whether the op runs; `reason()` says why not."""
        if self.on is None:
            why = reason()
            self.on = why is None
            if why is None:
                logger.info("dmtp: %s runs in place of SGLang's own", self.op)
            else:
                logger.warning("dmtp: %s falls back to SGLang's own: %s", self.op, why)
        return self.on


class SelectHook:
    """T2.. of a block: `_DflashDraftSampler.__call__`, inside the draft graph."""

    target = f"{_WORKER}._DflashDraftSampler.__call__"

    def __init__(self) -> None:
        self.switch = Switch("lm_head_select")

    def __call__(self, original: Any, sampler: Any, hidden_states: torch.Tensor, input_ids: Any = None) -> Any:
        width = hidden_states.shape[-1]
        rows = hidden_states.view(-1, sampler.block_size, width)[:, 1:].reshape(-1, width).to(sampler.weight.dtype)
        if not self.switch.takes(lambda: self._refusal(sampler, rows)):
            return original(sampler, hidden_states, input_ids)
        group = sampler.tp_group.device_group if sampler.tp_size > 1 else None
        token = tensors.select(rows, _head(sampler), group, logit_dtype="bfloat16")
        # a row without a number: SGLang's argmax calls it id 0 of the shard
        sampler.out[: len(rows)].copy_(token.clamp(min=0))
        return None

    def _refusal(self, sampler: Any, rows: torch.Tensor) -> str | None:
        if sampler.num_org < 1:
            return "this rank has no row of the head"
        if rows.dtype != torch.bfloat16:
            return f"logits are {rows.dtype}, must be compared in bfloat16"
        try:
            return supports("lm_head_select", rows, _head(sampler))
        except (ValueError, TypeError) as error:
            return str(error)


def _head(sampler: Any) -> Any:
    head = getattr(sampler, "_dmtp_head", None)
    if head is None:
        head = tensors.head_of(sampler.weight, num_org=sampler.num_org, org_vocab_start=sampler.org_vocab_start)
        sampler._dmtp_head = head
    return head


class CommitHook:
    """The drafter's context rows of a verification: `_append_target_hidden_fused`, one launch for all layers."""

    target = f"{_WORKER}.DFlashWorkerV2._append_target_hidden_fused"

    def __init__(self) -> None:
        self.switch = Switch("commit_kv")

    def __call__(
        self,
        original: Any,
        worker: Any,
        ctx_hidden: torch.Tensor,
        ctx_positions: torch.Tensor,
        ctx_cache_loc: torch.Tensor,
        ctx_cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
    ) -> Any:
        pool = worker.draft_model_runner.token_to_kv_pool
        if (
            ctx_cache_loc_2d is None
            or commit_lens is None
            or not self.switch.takes(lambda: self._refusal(worker, pool, ctx_hidden, ctx_cache_loc_2d, commit_lens))
        ):
            return original(worker, ctx_hidden, ctx_positions, ctx_cache_loc, ctx_cache_loc_2d, commit_lens)
        rows: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        worker._fused_kv_helper.materialize(
            ctx_hidden=ctx_hidden,
            positions=ctx_positions,
            write_layer_kv=lambda layer, k, v: rows.append((layer, k, v)),
        )
        caches_k, caches_v = self._caches(worker, pool)
        tensors.commit(
            [k for _, k, _ in rows],
            [v for _, _, v in rows],
            [caches_k[layer] for layer, _, _ in rows],
            [caches_v[layer] for layer, _, _ in rows],
            ctx_cache_loc_2d,
            commit_lens,
        )
        return None

    def _caches(self, worker: Any, pool: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        first = pool.start_layer
        ids = [layer.self_attn.attn.layer_id - first for layer in worker.draft_model.layers]
        return [pool.k_buffer[i] for i in ids], [pool.v_buffer[i] for i in ids]

    def _refusal(
        self, worker: Any, pool: Any, hidden: torch.Tensor, slots: torch.Tensor, commit_lens: torch.Tensor
    ) -> str | None:
        if worker._fused_kv_helper is None:
            return "the fused projection of the drafter's rows is off"
        if pool.store_dtype != pool.dtype or not pool.dtype.is_floating_point or pool.dtype.itemsize == 1:
            return f"the pool stores {pool.dtype} as {pool.store_dtype}"
        if pool.k_buffer[0].dim() != 3:
            return f"the pool's buffers have {pool.k_buffer[0].dim()} dimensions, must be [slots, heads, dim]"
        caches_k, caches_v = self._caches(worker, pool)
        rows = [[hidden.new_empty((*slots.shape, *c.shape[1:])) for c in caches] for caches in (caches_k, caches_v)]
        return supports("commit_kv", *rows, caches_k, caches_v, commit_lens, slots, first_slot=1)


class AcceptHook:
    """Greedy acceptance: `_compute_dflash_accept_bonus_triton_unchecked`, into the worker's buffers."""

    target = "sglang.kernels.ops.speculative.dflash._compute_dflash_accept_bonus_triton_unchecked"

    def __init__(self) -> None:
        self.switch = Switch("accept_prefix")
        self._scratch: dict[tuple[torch.device, int], tuple[torch.Tensor, ...]] = {}

    def __call__(
        self,
        original: Any,
        candidates: torch.Tensor,
        target_top1: torch.Tensor,
        accept_lens_out: torch.Tensor,
        commit_lens_out: torch.Tensor,
        bonus_ids_out: torch.Tensor,
        out_tokens_out: torch.Tensor,
        prefix_lens: torch.Tensor,
        new_seq_lens_out: torch.Tensor,
    ) -> Any:
        stops, budget, finished = self._fixed(candidates)
        if not self.switch.takes(lambda: supports("accept_prefix", candidates, target_top1, stops, budget)):
            return original(
                candidates=candidates,
                target_top1=target_top1,
                accept_lens_out=accept_lens_out,
                commit_lens_out=commit_lens_out,
                bonus_ids_out=bonus_ids_out,
                out_tokens_out=out_tokens_out,
                prefix_lens=prefix_lens,
                new_seq_lens_out=new_seq_lens_out,
            )
        torch.ops.dmtp.accept_prefix_out(
            candidates,
            target_top1,
            stops,
            budget,
            accept_len=accept_lens_out,
            commit_len=commit_lens_out,
            bonus=bonus_ids_out,
            out_tokens=out_tokens_out,
            finished=finished,
        )
        torch.add(prefix_lens, commit_lens_out, out=new_seq_lens_out)
        return None

    def _fixed(self, candidates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """No stop ids, no budget, and where `finished` goes: made once per batch size."""
        key, count = (candidates.device, len(candidates)), len(candidates)
        if key not in self._scratch:
            stops = torch.empty(0, dtype=torch.int64, device=candidates.device)
            budget = torch.full((count,), _ENDLESS, dtype=torch.int64, device=candidates.device)
            self._scratch[key] = stops, budget, torch.empty(count, dtype=torch.int32, device=candidates.device)
        return self._scratch[key]


class WindowHook:
    """The compact rows of the drafter's window: `_rebuild_compact_draft_cache`, straight from the target's slots."""

    target = f"{_WORKER}.DFlashWorkerV2._rebuild_compact_draft_cache"

    def __init__(self) -> None:
        self.switch = Switch("draft_page_table_from_slots")

    def __call__(self, original: Any, worker: Any, **given: Any) -> Any:
        source = worker.model_runner.req_to_token_pool.req_to_token
        drafts = worker.draft_model_runner.req_to_token_pool.req_to_token
        pool, lens = given["req_pool_indices"], given["prefix_lens"]
        window, page_size, block = int(worker.draft_window_size), int(worker.page_size), given["block_size"]
        options = {"window": window, "page_size": page_size, "block_slots": block, "req_pool_indices": pool}
        if not self.switch.takes(lambda: supports("draft_page_table_from_slots", source, lens, **options)):
            return original(worker, **given)
        pages = tensors.window_table(source, pool, lens, window=window, page_size=page_size, block_size=block)
        slots = pages.draft_table
        if page_size > 1:
            within = torch.arange(page_size, device=source.device)
            # the dummy row stays all zeros
            slots = torch.where(slots[:, :, None] > 0, slots[:, :, None] * page_size + within, 0).flatten(1)
        columns = min(slots.shape[1], drafts.shape[1])
        drafts[pool, :columns] = slots[:, :columns].to(drafts.dtype)
        return None


HOOKS: dict[str, Callable[[], Any]] = {
    "lm_head_select": SelectHook,
    "draft_page_table": WindowHook,
    "commit_kv": CommitHook,
    "accept_prefix": AcceptHook,
}
"""What can be switched on, by the names of `DMTP_SGLANG_OPS`."""
