"""Bad arguments of the T1 path are named, whatever they are instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmtp_kernels.ops.lm_head import lm_head_rescore, pack_lm_head
from dmtp_kernels.ops.lm_head.op import LM_HEAD_SELECT
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep

W = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "ids": (lambda: lm_head_rescore(W[:1], W, [1], torch.ones(1).int()), "ids: is a list"),  # type: ignore[arg-type]
    "map": (lambda: pack_lm_head(W, id_map=[1], id_map_mode="offset"), "id_map: is a list"),  # type: ignore[arg-type]
    "scale": (lambda: pack_lm_head(W.to(torch.int8), weight_scale=[1]), "weight_scale: is a list"),  # type: ignore[arg-type]
    "one row": (lambda: pack_lm_head(W[0].to(torch.int8), weight_scale=W[0]), "weight: has 1 dimensions"),
    "factors": (lambda: pack_lm_head(W, format="low_rank", factors=[W]), "factors: has 1 entries"),  # type: ignore[arg-type]
    "capacity": (lambda: pack_lm_head(W, capacity=1.5), "capacity: is 1.5"),  # type: ignore[arg-type]
    "valid": (lambda: pack_lm_head(W, num_valid=True), "num_valid: is True"),
    "matrix": (lambda: Fusion.residual([1], torch.ones(32)), "weight: is a list"),  # type: ignore[arg-type]
    "eps": (lambda: Fusion.residual(W, torch.ones(32), eps_m=float("nan")), "eps_m: is nan"),
    "table": (
        lambda: fused_t1_prep(torch.zeros(1).long(), W[:1], pack_lm_head(W), None, Fusion(), mask_id=1),  # type: ignore[arg-type]
        "embedding: is a NoneType",
    ),
    "factor": (
        lambda: fused_t1_prep(
            torch.zeros(1).long(), W[:1], pack_lm_head(W), W, Fusion(), mask_id=1, embed_scale=float("inf")
        ),
        "embed_scale: is inf",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_named(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


def test_outputs_that_repeat_elements_are_refused() -> None:
    head = pack_lm_head(W)
    key, status = torch.zeros(1, 2, dtype=torch.int64).expand(5, 2), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lm_head_select_out: key has strides \(0, 1\)"):
        LM_HEAD_SELECT.out(W[:5], *head.tensors(), **head.scalars(), k=2, logit_dtype="float32", key=key, status=status)
