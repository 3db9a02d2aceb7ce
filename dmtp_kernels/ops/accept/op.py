"""Schemas, argument checks and dispatch of the acceptance rules."""

from __future__ import annotations

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import INDEX_DTYPES, check_same_device, check_tensor


def _check_prefix(
    candidates: torch.Tensor,
    target: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    num_candidates: torch.Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_tensor("candidates", candidates, ["B", "R"], INDEX_DTYPES, sizes)
    if sizes["R"] < 1:
        raise ValueError("candidates: has no rows, must have at least the anchor's")
    check_tensor("target", target, ["B", "R"], INDEX_DTYPES, sizes)
    check_tensor("stop_ids", stop_ids, ["E"] if stop_ids.dim() == 1 else ["B", "E"], INDEX_DTYPES, sizes)
    check_tensor("budget", budget, ["B"], INDEX_DTYPES, sizes)
    if num_candidates is not None:
        check_tensor("num_candidates", num_candidates, ["B"], INDEX_DTYPES, sizes)
    check_same_device(
        "candidates",
        candidates.device,
        target=target,
        stop_ids=stop_ids,
        budget=budget,
        num_candidates=num_candidates,
    )


def _shapes_prefix(candidates: torch.Tensor, *_: object) -> list[Shape]:
    rows, width = candidates.shape
    return [
        ((rows,), torch.int32),
        ((rows,), torch.int32),
        ((rows,), torch.int64),
        ((rows, width), torch.int64),
        ((rows,), torch.int32),
    ]


ACCEPT_PREFIX = define_op(
    "accept_prefix",
    args="Tensor candidates, Tensor target, Tensor stop_ids, Tensor budget, Tensor? num_candidates=None",
    outs=("accept_len", "commit_len", "bonus", "out_tokens", "finished"),
    shapes=_shapes_prefix,
    check=_check_prefix,
    implementations={"reference": "dmtp_kernels.ops.accept.reference:accept_prefix"},
)
