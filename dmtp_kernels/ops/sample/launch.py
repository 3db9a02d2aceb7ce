"""Launches of the Triton kernels of sampling."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.sample import kernels
from dmtp_kernels.ops.sample.config import cut_config, power_of_two, race_config
from dmtp_kernels.ops.sample.filters import mass_bits
from dmtp_kernels.ops.sample.kernels_cut import sample_cut_kernel

_PART = 8 + 8 + 8 + 8  # bytes of what a part of a row leaves


def sample_rows(
    logits: torch.Tensor,  # [n, V]
    temperature: torch.Tensor,  # [n]
    seed: torch.Tensor,  # [n]
    position: torch.Tensor,  # [n]
    top_k: torch.Tensor | None,  # [n]
    top_p: torch.Tensor | None,  # [n]
    num_valid: int | None,
    stream: int,
    token: torch.Tensor,  # [n] out
    status: torch.Tensor,  # [n] out
) -> None:
    rows, columns = logits.shape
    num_valid = columns if num_valid is None else num_valid
    if rows == 0:
        return
    config = race_config(num_valid, logits.device)
    splits = -(-num_valid // config.columns)
    memory = workspace("sample_rows", logits.device, rows * (splits * _PART + 16)).view(torch.int64)
    cut_key, cut_id = memory[:rows], memory[rows : 2 * rows]
    # [n, splits] each: the largest entry, its id, the winner, whether one is NaN
    tops, firsts, winners, nans = memory[2 * rows : (2 + 4 * splits) * rows].view(4, -1).unbind()
    keyed = (temperature, top_p, seed, position)
    outputs = (token, token.stride(0), status, status.stride(0))
    filtered = top_k is not None or top_p is not None
    kind = config.kind(logits.dtype)
    # Triton launches on the current device
    with torch.cuda.device(logits.device) if logits.device.type == "cuda" else nullcontext():
        if filtered:
            cut = cut_config(num_valid, logits.device)
            sample_cut_kernel[(rows,)](
                logits, logits.stride(0), 0, temperature, top_k, top_p, num_valid, 1, 2.0 ** mass_bits(num_valid),
                cut_key.view(torch.uint64), cut_id,
                **kind, DIGITS=cut.digits(logits.dtype), N=cut.columns, num_warps=cut.warps, **cut.options,
            )  # fmt: skip
        kernels.sample_race_kernel[(rows * splits,)](
            logits, logits.stride(0), *keyed,
            cut_key.view(torch.uint64) if filtered else None, cut_id if filtered else None,
            num_valid, stream, splits,
            tops.view(torch.float64), firsts, winners, nans.view(torch.int32), *outputs,
            **kind, SINGLE=splits == 1, N=config.columns, num_warps=config.warps, **config.options,
        )  # fmt: skip
        if splits > 1:
            kernels.sample_finish_kernel[(rows,)](
                logits, logits.stride(0), *keyed, stream, splits,
                tops.view(torch.float64), firsts, winners, nans.view(torch.int32), *outputs,
                W=power_of_two(splits), num_warps=config.finish_warps, **config.options,
            )  # fmt: skip
