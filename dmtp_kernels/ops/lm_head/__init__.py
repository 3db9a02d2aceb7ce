"""The vocabulary head without logits: exact greedy tokens from a cheap screen and canonical dots of its survivors."""

from __future__ import annotations

import dataclasses

import torch

from dmtp_kernels._supports import takes_packed
from dmtp_kernels.ops._checks import check_choice, check_instance, check_whole
from dmtp_kernels.ops.lm_head.canonical import canonical_dot
from dmtp_kernels.ops.lm_head.head import LMHead
from dmtp_kernels.ops.lm_head.keys import NO_KEY, combine_keys, decode_key, encode_key, key_token
from dmtp_kernels.ops.lm_head.op import LM_HEAD_RESCORE, LM_HEAD_SCREEN, LM_HEAD_SELECT, LOGIT_DTYPES
from dmtp_kernels.ops.lm_head.pack import pack_lm_head
from dmtp_kernels.ops.lm_head.report import HeadReport, lm_head_report

NO_TOKEN, UNCERTIFIED = 1, 2
"""Bits of `status`: every logit of the row is NaN (or the rank has no rows); the answer is not proved."""

__all__ = [
    "NO_KEY",
    "NO_TOKEN",
    "UNCERTIFIED",
    "HeadReport",
    "LMHead",
    "canonical_dot",
    "combine_keys",
    "decode_key",
    "encode_key",
    "key_token",
    "lm_head_report",
    "lm_head_rescore",
    "lm_head_screen",
    "lm_head_select",
    "pack_lm_head",
]


@takes_packed(LMHead)
def lm_head_select(
    hidden: torch.Tensor, head: LMHead, k: int = 1, logit_dtype: str = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greedy tokens of each hidden state over the whole head.

    The answer is decided by canonical dots alone: the same for every format that is certified or scans, every batch
    size, backend and shard. Ties go to the lowest token id, NaN never wins, -inf and +inf are ordinary values, padding
    rows never win.

    Args:
        hidden: `[n, H]` fp32/bf16/fp16/fp64, any row stride.
        head: from `pack_lm_head`.
        k: tokens per row, at most `head.capacity`.
        logit_dtype: `float32`, or `bfloat16` to round each canonical dot before comparing (more ties).

    Returns:
        `(key [n, k] int64, status [n] int32)`, best first; `decode_key` gives tokens and logits. Where fewer than k
        rows have a token the key is `NO_KEY` (token -1). `status` holds the bits `NO_TOKEN` and `UNCERTIFIED`.

    Raises:
        ValueError, TypeError: a shape, dtype, device or choice is wrong; the message names the argument.
    """
    check_instance("hidden", hidden, torch.Tensor)
    check_instance("head", head, LMHead)
    check_whole("k", k)
    check_choice("logit_dtype", logit_dtype, LOGIT_DTYPES)
    return LM_HEAD_SELECT.call(hidden, *head.tensors(), **head.scalars(), k=k, logit_dtype=logit_dtype)


@takes_packed(LMHead)
def lm_head_screen(
    hidden: torch.Tensor, head: LMHead, capacity: int | None = None, *, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cheap pass alone: the rows that can still be among the k best, or the shortlist of an uncertified format.

    Args:
        hidden: `[n, H]`.
        head: from `pack_lm_head`.
        capacity: K, columns of `ids` (default `head.capacity`).
        k: how many best rows must be among the survivors, at most K.

    Returns:
        `ids [n, K]` int64 head ids (row + id_offset, before any id map), ascending, -1 after them;
        `count [n]` int32, the rows that belong on the list; above K it is not complete. Certified formats: the
        survivors, of which a kernel may list more than the reference. Uncertified formats: the shortlist, which is the
        same on every backend (README.md beside this file);
        `lower_bound [n]` float32, a proved lower bound of the k-th best logit (-inf for uncertified formats).

    Raises:
        ValueError, TypeError: as `lm_head_select`.
    """
    check_instance("hidden", hidden, torch.Tensor)
    check_instance("head", head, LMHead)
    check_whole("k", k)
    if capacity is not None:
        head = dataclasses.replace(head, capacity=capacity)
    return LM_HEAD_SCREEN.call(hidden, *head.tensors(), **head.scalars(), k=k)


def lm_head_rescore(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    count: torch.Tensor,
    k: int = 1,
    id_offset: int = 0,
    logit_dtype: str = "float32",
    *,
    num_valid: int | None = None,
) -> torch.Tensor:
    """Canonical dots of the listed rows, the k best as keys.

    Args:
        hidden: `[n, H]`.
        weight: `[V, H]`, this rank's rows; row r has head id `r + id_offset`.
        ids: `[n, K]` int32/int64 head ids in any order. Negative ids, ids of other ranks and padding rows are skipped,
            never read. For k > 1 they must be distinct.
        count: `[n]` int32/int64, only the first `count` entries are used (clamped to 0..K).
        k: at most K.
        logit_dtype: as `lm_head_select`.
        id_offset: this rank's first head id.
        num_valid: rows of `weight` that are real (default: all).

    Returns:
        `key [n, k]` int64; its token is the head id.

    Raises:
        ValueError, TypeError: as `lm_head_select`.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), ("ids", ids), ("count", count)):
        check_instance(name, tensor, torch.Tensor)
    num_valid = weight.shape[0] if num_valid is None else num_valid
    for name, number in (("k", k), ("id_offset", id_offset), ("num_valid", num_valid)):
        check_whole(name, number)
    check_choice("logit_dtype", logit_dtype, LOGIT_DTYPES)
    return LM_HEAD_RESCORE.call(
        hidden, weight, ids, count, k=k, id_offset=id_offset, num_valid=num_valid, logit_dtype=logit_dtype
    )
