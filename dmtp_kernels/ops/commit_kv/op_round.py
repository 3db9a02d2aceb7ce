"""Schema, argument checks and dispatch of the commit of all caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import INDEX_DTYPES, check_range, check_same_device, check_tensor
from dmtp_kernels.ops.commit_kv.op import (
    FP8_DTYPES,
    check_devices,
    check_layers,
    check_lengths,
    check_optional,
    check_pairs,
    check_scale,
    like,
)
from dmtp_kernels.ops.commit_kv.round_layers import cache_layers, is_absent


def _check_counts(total: int, dst: Sequence[torch.Tensor], layers: Sequence[int], first_slot: Sequence[int]) -> None:
    caches = len(layers)
    if caches == 0:
        raise ValueError("layers: is empty, must have one entry per cache")
    for c, count in enumerate(layers):
        check_range(f"layers[{c}]", count, 1)
    if sum(layers) != total:
        raise ValueError(f"layers: adds up to {sum(layers)}, must be {total}, the layers of rows_k")
    if len(dst) != caches:
        raise ValueError(f"dst: has {len(dst)} tensors, must be {caches} like layers")
    if len(first_slot) not in (1, caches):
        raise ValueError(f"first_slot: has {len(first_slot)} entries, must be 1 or {caches} like layers")
    for c, slot in enumerate(first_slot):
        check_range("first_slot" if len(first_slot) == 1 else f"first_slot[{c}]", slot, 0)


def _check_scales(
    name: str,
    scales: Sequence[torch.Tensor] | None,
    caches: Sequence[torch.Tensor],
    layers: Sequence[int],
    sizes: Sequence[dict[str, int]],
) -> None:
    if scales is not None and len(scales) not in (len(layers), len(caches)):
        raise ValueError(
            f"{name}: has {len(scales)} tensors, must be {len(layers)} like layers or {len(caches)} like rows_k"
        )
    for own in cache_layers(layers):
        dtype = caches[own.first].dtype
        if scales is None:
            if dtype in FP8_DTYPES:
                raise ValueError(f"{name}: is None, must be given for {name[0]}_caches[{own.first}] of {dtype}")
            continue
        start, stop = (own.index, own.index + 1) if len(scales) == len(layers) else (own.first, own.last)
        if sizes[own.index]["Hkv"] == 0 and all(is_absent(scale) for scale in scales[start:stop]):
            continue  # one scale a head
        absent = is_absent(scales[start])
        for i in range(start, stop):
            if is_absent(scales[i]) != absent or (absent and dtype in FP8_DTYPES):
                raise ValueError(f"{name}[{i}]: is empty, which none or all layers of a cache may be, and not of fp8")
            if not absent:
                check_scale(f"{name}[{i}]", scales[i], sizes[own.index])


def _check(
    rows_k: Sequence[torch.Tensor],
    rows_v: Sequence[torch.Tensor],
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    valid: torch.Tensor,
    dst: Sequence[torch.Tensor],
    layers: Sequence[int],
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
    first_slot: Sequence[int],
    k_scale: Sequence[torch.Tensor] | None,
    v_scale: Sequence[torch.Tensor] | None,
) -> None:
    check_lengths(len(rows_k), rows_k=rows_k, k_caches=k_caches, rows_v=rows_v, v_caches=v_caches)
    _check_counts(len(rows_k), dst, layers, first_slot)
    shared: dict[str, int] = {}
    check_tensor("valid", valid, ["B"], INDEX_DTYPES, shared, last_contiguous=False)
    sizes = []
    for of in cache_layers(layers):
        check_tensor(f"dst[{of.index}]", dst[of.index], ["B", "R"], INDEX_DTYPES, shared, like=like(0, "dst[0]"))
        own = dict(shared)
        first = of.first
        check_layers(own, "k", rows_k, k_caches, first, of.last, "dst[0]")
        check_layers(own, "v", rows_v, v_caches, first, of.last, "dst[0]")
        if v_caches[first].dim() != k_caches[first].dim():
            raise ValueError(
                f"v_caches[{first}]: has {v_caches[first].dim()} dimensions, must be {k_caches[first].dim()} "
                f"like k_caches[{first}]"
            )
        sizes.append(own)
    if shared["R"] < 1:
        raise ValueError("dst[0]: has no rows, must have at least 1")
    check_pairs(
        [("pending_slot", pending_slot, "promote_dst", promote_dst), ("hidden", hidden, "next_hidden", next_hidden)]
    )
    named = check_optional(shared, "dst[0]", pending_slot, promote_dst, scratch_dst, hidden, next_hidden, lengths, live)
    _check_scales("k_scale", k_scale, k_caches, layers, sizes)
    _check_scales("v_scale", v_scale, v_caches, layers, sizes)
    check_same_device("valid", valid.device, **named)
    check_devices(
        valid.device, rows_k=rows_k, rows_v=rows_v, k_caches=k_caches, v_caches=v_caches, dst=dst,
        k_scale=k_scale or (), v_scale=v_scale or (),
    )  # fmt: skip


def _shapes(rows_k: object, rows_v: object, k_caches: object, v_caches: object, valid: Any, *_: object) -> list[Shape]:
    return [((valid.shape[0],), torch.int32)]


COMMIT_ROUND = define_op(
    "commit_round",
    args=(
        "Tensor[] rows_k, Tensor[] rows_v, Tensor(w!)[] k_caches, Tensor(x!)[] v_caches, Tensor valid, Tensor[] dst, "
        "*, int[] layers, Tensor? pending_slot=None, Tensor? promote_dst=None, Tensor? scratch_dst=None, "
        "Tensor? hidden=None, Tensor(y!)? next_hidden=None, Tensor(z!)? lengths=None, Tensor? live=None, "
        "int[] first_slot=[0], Tensor[]? k_scale=None, Tensor[]? v_scale=None"
    ),
    outs=("error",),
    shapes=_shapes,
    check=_check,
    implementations={
        "reference": "dmtp_kernels.ops.commit_kv.reference:commit_round",
        "cpu": "dmtp_kernels.ops.commit_kv.cpu:commit_round",
        "triton": "dmtp_kernels.ops.commit_kv.launch:commit_round",
        "cuda": "dmtp_kernels.ops.commit_kv.cuda:commit_round",
    },
)
