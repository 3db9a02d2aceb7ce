"""Schemas, argument checks and dispatch of the acceptance rules."""

from __future__ import annotations

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import FLOAT_DTYPES, INDEX_DTYPES, check_same_device, check_tensor


def _check_request(
    candidates: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    num_candidates: torch.Tensor | None,
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    check_tensor("candidates", candidates, ["B", "R"], INDEX_DTYPES, sizes)
    if sizes["R"] < 1:
        raise ValueError("candidates: has no rows, must have at least the anchor's")
    check_tensor("stop_ids", stop_ids, ["E"] if stop_ids.dim() == 1 else ["B", "E"], INDEX_DTYPES, sizes)
    check_tensor("budget", budget, ["B"], INDEX_DTYPES, sizes)
    if num_candidates is not None:
        check_tensor("num_candidates", num_candidates, ["B"], INDEX_DTYPES, sizes)
    check_same_device("candidates", candidates.device, stop_ids=stop_ids, budget=budget, num_candidates=num_candidates)
    return sizes


def _check_prefix(
    candidates: torch.Tensor,
    target: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    num_candidates: torch.Tensor | None,
) -> None:
    sizes = _check_request(candidates, stop_ids, budget, num_candidates)
    check_tensor("target", target, ["B", "R"], INDEX_DTYPES, sizes)
    check_same_device("candidates", candidates.device, target=target)


def _check_rejection(
    candidates: torch.Tensor,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    draft_probs: torch.Tensor | None,
    num_candidates: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    draft_ids: torch.Tensor | None,
) -> None:
    sizes = _check_request(candidates, stop_ids, budget, num_candidates)
    check_tensor("target_logits", target_logits, ["B", "R", "V"], FLOAT_DTYPES, sizes)
    if sizes["V"] < 1:
        raise ValueError("target_logits: has no columns, must have at least 1")
    check_tensor("temperature", temperature, ["B"], FLOAT_DTYPES, sizes)
    check_tensor("seed", seed, ["B"], INDEX_DTYPES, sizes)
    check_tensor("position", position, ["B"], INDEX_DTYPES, sizes)
    sizes["K"] = sizes["R"] - 1
    if draft_ids is not None:
        if draft_probs is None:
            raise ValueError("draft_ids: is given without draft_probs, must come with the probabilities of its ids")
        check_tensor("draft_ids", draft_ids, ["B", "K", "N"], INDEX_DTYPES, sizes)
    if draft_probs is not None:
        columns = "V" if draft_ids is None else "N"
        like = {"V": "target_logits, or pass draft_ids for the ids of a shortlist", "N": "draft_ids"}
        check_tensor("draft_probs", draft_probs, ["B", "K", columns], FLOAT_DTYPES, sizes, like=like)
    if top_k is not None:
        check_tensor("top_k", top_k, ["B"], INDEX_DTYPES, sizes)
    if top_p is not None:
        check_tensor("top_p", top_p, ["B"], FLOAT_DTYPES, sizes)
    check_same_device(
        "candidates",
        candidates.device,
        target_logits=target_logits,
        temperature=temperature,
        seed=seed,
        position=position,
        draft_probs=draft_probs,
        top_k=top_k,
        top_p=top_p,
        draft_ids=draft_ids,
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


def _shapes_sampled(candidates: torch.Tensor, *_: object) -> list[Shape]:
    return [*_shapes_prefix(candidates), ((candidates.shape[0],), torch.int32)]


_OUTS = ("accept_len", "commit_len", "bonus", "out_tokens", "finished")
_SAMPLED_ARGS = (
    "Tensor candidates, Tensor target_logits, Tensor temperature, Tensor seed, Tensor position, Tensor stop_ids, "
    "Tensor budget, Tensor? draft_probs=None, Tensor? num_candidates=None, Tensor? top_k=None, Tensor? top_p=None, "
    "Tensor? draft_ids=None"
)
_NONE_HINTS = {
    "stop_ids": "empty [0] for no stop ids",
    "draft_probs": "what the candidates were drawn from; block verification needs q",
}
_BLOCK_ARGS = _SAMPLED_ARGS.replace("Tensor? draft_probs=None", "Tensor draft_probs")

ACCEPT_PREFIX = define_op(
    "accept_prefix",
    args="Tensor candidates, Tensor target, Tensor stop_ids, Tensor budget, Tensor? num_candidates=None",
    outs=_OUTS,
    shapes=_shapes_prefix,
    check=_check_prefix,
    implementations={
        "triton": "dmtp_kernels.ops.accept.launch:accept_prefix",
        "cuda": "dmtp_kernels.ops.accept.cuda:accept_prefix",
        "cpu": "dmtp_kernels.ops.accept.cpu:accept_prefix",
        "reference": "dmtp_kernels.ops.accept.reference:accept_prefix",
    },
    none_hints=_NONE_HINTS,
)

ACCEPT_REJECTION = define_op(
    "accept_rejection",
    args=_SAMPLED_ARGS,
    outs=(*_OUTS, "status"),
    shapes=_shapes_sampled,
    check=_check_rejection,
    implementations={
        "triton": "dmtp_kernels.ops.accept.launch:accept_rejection",
        "cuda": "dmtp_kernels.ops.accept.cuda:accept_rejection",
        "cpu": "dmtp_kernels.ops.accept.cpu:accept_rejection",
        "reference": "dmtp_kernels.ops.accept.reference:accept_rejection",
    },
    none_hints=_NONE_HINTS,
)

ACCEPT_BLOCK = define_op(
    "accept_block",
    args=_BLOCK_ARGS,
    outs=(*_OUTS, "status"),
    shapes=_shapes_sampled,
    check=_check_rejection,
    implementations={
        "triton": "dmtp_kernels.ops.accept.launch:accept_block",
        "cuda": "dmtp_kernels.ops.accept.cuda:accept_block",
        "cpu": "dmtp_kernels.ops.accept.cpu:accept_block",
        "reference": "dmtp_kernels.ops.accept.reference:accept_block",
    },
    none_hints=_NONE_HINTS,
)
