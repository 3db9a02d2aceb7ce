"""Schemas, argument checks and dispatch of the head's three ops."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_part,
    check_range,
    check_same_device,
    check_tensor,
)
from dmtp_kernels.ops.lm_head.head import HEAD_SCALARS, HEAD_TENSORS, HeadArgs, check_head

LOGIT_DTYPES = ("float32", "bfloat16")
_HEAD = len(HeadArgs._fields)


def _check_hidden(hidden: torch.Tensor, head: HeadArgs) -> None:
    sizes: dict[str, int] = {}
    check_part("head", check_head, head, sizes)
    check_tensor("hidden", hidden, ["n", "H"], FLOAT_DTYPES, sizes, like={"H": "head.weight"})
    check_same_device("hidden", hidden.device, **{"head.weight": head.weight})


def _check_select(hidden: torch.Tensor, *rest: Any) -> None:
    _check_hidden(hidden, HeadArgs(*rest[:_HEAD]))
    k, logit_dtype = rest[_HEAD:]
    check_range("k", k, 1, HeadArgs(*rest[:_HEAD]).capacity)
    check_choice("logit_dtype", logit_dtype, LOGIT_DTYPES)


def _shapes_select(hidden: torch.Tensor, *rest: Any) -> list[Shape]:
    rows, k = hidden.shape[0], rest[_HEAD]
    return [((rows, k), torch.int64), ((rows,), torch.int32)]


def _check_screen(hidden: torch.Tensor, *rest: Any) -> None:
    _check_hidden(hidden, HeadArgs(*rest[:_HEAD]))
    check_range("k", rest[_HEAD], 1, HeadArgs(*rest[:_HEAD]).capacity)


def _shapes_screen(hidden: torch.Tensor, *rest: Any) -> list[Shape]:
    rows, capacity = hidden.shape[0], HeadArgs(*rest[:_HEAD]).capacity
    return [((rows, capacity), torch.int64), ((rows,), torch.int32), ((rows,), torch.float32)]


def _check_rescore(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    count: torch.Tensor,
    k: int,
    id_offset: int,
    num_valid: int,
    logit_dtype: str,
) -> None:
    sizes: dict[str, int] = {}
    check_tensor("hidden", hidden, ["n", "H"], FLOAT_DTYPES, sizes)
    like = {"n": "hidden", "H": "hidden"}
    check_tensor("weight", weight, ["V", "H"], FLOAT_DTYPES, sizes, like=like)
    check_tensor("ids", ids, ["n", "K"], INDEX_DTYPES, sizes, like=like)
    check_tensor("count", count, ["n"], INDEX_DTYPES, sizes, like=like)
    check_range("k", k, 1, max(1, sizes["K"]))
    check_range("id_offset", id_offset, 0, 2**31 - 1 - sizes["V"])
    check_range("num_valid", num_valid, 0, sizes["V"])
    check_choice("logit_dtype", logit_dtype, LOGIT_DTYPES)
    check_same_device("hidden", hidden.device, weight=weight, ids=ids, count=count)


def _shapes_rescore(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, count: torch.Tensor, k: int, *_: Any
) -> list[Shape]:
    return [((hidden.shape[0], k), torch.int64)]


LM_HEAD_SELECT = define_op(
    "lm_head_select",
    args=f"Tensor hidden, Tensor weight, {HEAD_TENSORS}, *, {HEAD_SCALARS}, int k=1, str logit_dtype='float32'",
    outs=("key", "status"),
    shapes=_shapes_select,
    check=_check_select,
    implementations={
        "triton": "dmtp_kernels.ops.lm_head.launch:lm_head_select",
        "cpu": "dmtp_kernels.ops.lm_head.cpu:lm_head_select",
        "reference": "dmtp_kernels.ops.lm_head.reference:lm_head_select",
    },
)

LM_HEAD_SCREEN = define_op(
    "lm_head_screen",
    args=f"Tensor hidden, Tensor weight, {HEAD_TENSORS}, *, {HEAD_SCALARS}, int k=1",
    outs=("ids", "count", "lower_bound"),
    shapes=_shapes_screen,
    check=_check_screen,
    implementations={
        "triton": "dmtp_kernels.ops.lm_head.launch:lm_head_screen",
        "cpu": "dmtp_kernels.ops.lm_head.cpu:lm_head_screen",
        "reference": "dmtp_kernels.ops.lm_head.reference:lm_head_screen",
    },
)

LM_HEAD_RESCORE = define_op(
    "lm_head_rescore",
    args="Tensor hidden, Tensor weight, Tensor ids, Tensor count, *, "
    "int k, int id_offset, int num_valid, str logit_dtype='float32'",
    outs=("key",),
    shapes=_shapes_rescore,
    check=_check_rescore,
    implementations={
        "triton": "dmtp_kernels.ops.lm_head.launch:lm_head_rescore",
        "cpu": "dmtp_kernels.ops.lm_head.cpu:lm_head_rescore",
        "reference": "dmtp_kernels.ops.lm_head.reference:lm_head_rescore",
    },
)
