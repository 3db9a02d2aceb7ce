"""Launches of the Triton kernels of the acceptance rules."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.accept import kernels, kernels_finish, kernels_rows
from dmtp_kernels.ops.accept.config import power_of_two, prefix_config, sampled_config
from dmtp_kernels.ops.sample.config import cut_config, kind_of
from dmtp_kernels.ops.sample.filters import mass_bits
from dmtp_kernels.ops.sample.kernels_cut import sample_cut_kernel


def accept_prefix(
    candidates: torch.Tensor,  # [B, R]
    target: torch.Tensor,  # [B, R]
    stop_ids: torch.Tensor,  # [B, E] or [E]
    budget: torch.Tensor,  # [B]
    num_candidates: torch.Tensor | None,  # [B]
    accept_len: torch.Tensor,  # [B] out
    commit_len: torch.Tensor,  # [B] out
    bonus: torch.Tensor,  # [B] out
    out_tokens: torch.Tensor,  # [B, R] out
    finished: torch.Tensor,  # [B] out
) -> None:
    batch, rows = candidates.shape
    if batch == 0:
        return
    config = prefix_config(rows, candidates.device)
    stop_stride = stop_ids.stride(0) if stop_ids.dim() == 2 else 0
    # Triton launches on the current device
    with torch.cuda.device(candidates.device) if candidates.device.type == "cuda" else nullcontext():
        kernels.accept_prefix_kernel[(-(-batch // config.requests),)](
            candidates, candidates.stride(0), target, target.stride(0),
            stop_ids, stop_stride, stop_ids.shape[-1], budget, num_candidates,
            accept_len, commit_len, bonus, out_tokens, finished,
            accept_len.stride(0), commit_len.stride(0), bonus.stride(0), out_tokens.stride(0), out_tokens.stride(1),
            finished.stride(0), batch, rows,
            P=config.requests, W=config.columns, num_warps=config.warps,
        )  # fmt: skip


def accept_rejection(*arguments: torch.Tensor | None) -> None:
    _accept_sampled(False, *arguments)  # type: ignore[arg-type]


def accept_block(*arguments: torch.Tensor | None) -> None:
    _accept_sampled(True, *arguments)  # type: ignore[arg-type]


def _accept_sampled(
    block: bool,
    candidates: torch.Tensor,  # [B, R]
    target_logits: torch.Tensor,  # [B, R, V]
    temperature: torch.Tensor,  # [B]
    seed: torch.Tensor,  # [B]
    position: torch.Tensor,  # [B]
    stop_ids: torch.Tensor,  # [B, E] or [E]
    budget: torch.Tensor,  # [B]
    draft_probs: torch.Tensor | None,  # [B, K, V], or [B, K, N] with draft_ids
    num_candidates: torch.Tensor | None,  # [B]
    top_k: torch.Tensor | None,  # [B]
    top_p: torch.Tensor | None,  # [B]
    draft_ids: torch.Tensor | None,  # [B, K, N]
    accept_len: torch.Tensor,  # [B] out
    commit_len: torch.Tensor,  # [B] out
    bonus: torch.Tensor,  # [B] out
    out_tokens: torch.Tensor,  # [B, R] out
    finished: torch.Tensor,  # [B] out
    status: torch.Tensor,  # [B] out
) -> None:
    batch, rows, vocab = target_logits.shape
    if batch == 0:
        return
    device = target_logits.device
    config = sampled_config(vocab, block, device)
    splits = -(-vocab // config.columns)
    per_request, per_row, per_part, per_race = kernels_rows.WORDS
    words = batch * (per_request + rows * (per_row + per_part * splits) + per_race * splits)
    filtered = top_k is not None or top_p is not None
    memory = workspace("accept_sampled", device, 8 * (words + 2 * batch * rows)).view(torch.int64)
    # the cuts lie behind the kernels' own words
    cut_key, cut_id = memory[words : words + 2 * batch * rows].view(2, -1).unbind()
    cuts = (cut_key.view(torch.uint64), cut_id) if filtered else (None, None)
    kind = kind_of(target_logits.dtype)
    drafted = (candidates, candidates.stride(0), target_logits, target_logits.stride(0), target_logits.stride(1))
    limits = (temperature, top_p, budget, num_candidates)
    dense = (draft_probs, *_strides(draft_probs))
    draft = (*dense, draft_ids, *_strides(draft_ids), 0 if draft_ids is None else draft_ids.shape[2])
    size = (memory, batch, rows, splits)
    tile = {**kind, "N": config.columns}
    lanes = {"W": power_of_two(splits), "L": 1 if draft_ids is None else power_of_two(draft_ids.shape[2])}
    options = {"num_warps": config.warps, **config.options}
    few = {"num_warps": config.finish_warps, **config.options}
    # Triton launches on the current device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if filtered:
            cut = cut_config(vocab, device)
            sample_cut_kernel[(batch * rows,)](
                target_logits, target_logits.stride(0), target_logits.stride(1), temperature, top_k, top_p, vocab, rows,
                2.0 ** mass_bits(vocab), *cuts, **kind, DIGITS=cut.digits(target_logits.dtype), N=cut.columns,
                num_warps=cut.warps, **cut.options,
            )  # fmt: skip
        listed = draft_ids is not None
        kernels_rows.accept_rows_kernel[(batch * rows * splits,)](
            *drafted[2:], *limits, *((None, 0, 0) if listed else dense), *cuts, *size, vocab, **tile, **options
        )
        kernels_finish.accept_decide_kernel[(batch,)](
            *drafted, *limits, seed, position, *draft, *cuts, *size, vocab, BLOCK=block, **kind, **lanes, **few
        )
        if block and rows > 2:
            kernels_rows.accept_surplus_kernel[(batch * (rows - 2) * splits,)](
                *drafted, *limits, *draft, *cuts, *size, vocab, **tile, L=lanes["L"], **options
            )
        kernels_finish.accept_race_kernel[(batch * splits,)](
            *drafted, *limits, seed, position, *draft, *cuts, *size, vocab, BLOCK=block, **tile, **lanes, **options
        )
        stop_stride = stop_ids.stride(0) if stop_ids.dim() == 2 else 0
        kernels_finish.accept_finish_kernel[(batch,)](
            *drafted[:2], *limits, stop_ids, stop_stride, stop_ids.shape[-1], *size,
            accept_len, commit_len, bonus, out_tokens, finished, status,
            accept_len.stride(0), commit_len.stride(0), bonus.stride(0), out_tokens.stride(0), out_tokens.stride(1),
            finished.stride(0), status.stride(0), BLOCK=block, W=lanes["W"], C=power_of_two(rows), **few,
        )  # fmt: skip


def _strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
