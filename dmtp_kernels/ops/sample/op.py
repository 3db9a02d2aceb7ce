"""Schema, argument checks and dispatch of sampling."""

from __future__ import annotations

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import FLOAT_DTYPES, INDEX_DTYPES, check_range, check_same_device, check_tensor


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    num_valid: int | None,
    stream: int,
) -> None:
    sizes: dict[str, int] = {}
    if logits.dim() == 3:
        raise ValueError(
            f"logits: has 3 dimensions {tuple(logits.shape)}, must be [n, V]; flatten [B, R, V] to [B*R, V] and repeat "
            "each request's parameters R times"
        )
    check_tensor("logits", logits, ["n", "V"], FLOAT_DTYPES, sizes)
    if sizes["V"] < 1:
        raise ValueError("logits: has no columns, must have at least 1")
    check_tensor("temperature", temperature, ["n"], FLOAT_DTYPES, sizes)
    check_tensor("seed", seed, ["n"], INDEX_DTYPES, sizes)
    check_tensor("position", position, ["n"], INDEX_DTYPES, sizes)
    if top_k is not None:
        check_tensor("top_k", top_k, ["n"], INDEX_DTYPES, sizes)
    if top_p is not None:
        check_tensor("top_p", top_p, ["n"], FLOAT_DTYPES, sizes)
    if num_valid is not None:
        check_range("num_valid", num_valid, 1, sizes["V"])
    check_range("stream", stream, 0, 2**32 - 1)
    check_same_device(
        "logits",
        logits.device,
        temperature=temperature,
        seed=seed,
        position=position,
        top_k=top_k,
        top_p=top_p,
    )


def _shapes(logits: torch.Tensor, *_: object) -> list[Shape]:
    return [((logits.shape[0],), torch.int64), ((logits.shape[0],), torch.int32)]


SAMPLE_ROWS = define_op(
    "sample_rows",
    args=(
        "Tensor logits, Tensor temperature, Tensor seed, Tensor position, Tensor? top_k=None, Tensor? top_p=None, "
        "int? num_valid=None, int stream=0"
    ),
    outs=("token", "status"),
    shapes=_shapes,
    check=_check,
    implementations={
        "triton": "dmtp_kernels.ops.sample.launch:sample_rows",
        "cuda": "dmtp_kernels.ops.sample.cuda:sample_rows",
        "cpu": "dmtp_kernels.ops.sample.cpu:sample_rows",
        "reference": "dmtp_kernels.ops.sample.reference:sample_rows",
    },
)
