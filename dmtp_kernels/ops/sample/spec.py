"""Inputs and traffic of sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes


def _case(
    rows: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    filters: bool = False,
    padding: int = 0,
    faults: bool = False,
) -> Callable[[torch.Generator], tuple[Any, ...]]:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        logits = (4 * torch.randn(rows, vocab + padding, generator=generator)).to(dtype)
        if padding:
            logits[:, vocab:] = torch.nan
        if faults:
            logits[0], logits[1, :-1], logits[2, 3] = torch.nan, -torch.inf, torch.inf
        temperature = torch.tensor([0.0, 0.7, 1.0, 1e-6])[torch.arange(rows) % 4]
        if faults:
            temperature[-1] = -1.0
        seed = torch.randint(-(2**31), 2**31, (rows,), generator=generator).to(index)
        position = torch.randint(0, 2**20, (rows,), generator=generator).to(index)
        top_k = torch.randint(0, vocab + 2, (rows,), generator=generator).to(index) if filters else None
        top_p = torch.rand(rows, generator=generator) * 1.2 if filters else None
        return logits, temperature, seed, position, top_k, top_p, vocab if padding else None, int(filters)

    return make


def _floor_bytes(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    num_valid: int | None,
    stream: int,
) -> int:
    outputs = logits.shape[0] * (8 + 4)
    return nbytes(logits[:, :num_valid], temperature, seed, position, top_k, top_p) + outputs


SAMPLE = Spec(
    op="sample_rows",
    cases=(
        Case("bytes", "the embedded model: 8 verify rows of 8 requests, byte vocabulary", _case(64, 260)),
        Case("filters", "top-k and top-p with every off value, draft stream", _case(16, 257, filters=True)),
        Case(
            "padded",
            "padded vocabulary poisoned with NaN, bf16, int32",
            _case(5, 61, dtype=torch.bfloat16, index=torch.int32, padding=3),
        ),
        Case("faults", "NaN row, one finite entry, +inf, bad temperature", _case(7, 33, faults=True)),
        Case("single", "one entry to choose from", _case(3, 1)),
        Case("empty", "no row", _case(0, 260)),
    ),
    floor_bytes=_floor_bytes,
    # ten Philox rounds of about 16 operations make four draws; two logarithms, a division and a comparison each
    flops=lambda logits, *_: logits.numel() * (10 * 16 // 4 + 4),
    exact=True,
)

SPECS = (SAMPLE,)

_FULL, _CUT = 248_320, 16_384
_PART = 8 + 8 + 8 + 4  # bytes that a part of 2,048 entries leaves


def _race_bytes(logits: torch.Tensor, temperature: torch.Tensor, *rest: torch.Tensor | None) -> int:
    keyed = sum(nbytes(t) for t in (temperature, rest[0], rest[1]))
    return nbytes(logits) + keyed + logits.shape[0] * (logits.shape[1] // 2048) * _PART


def _rows_of(rows: int, dtype: torch.dtype) -> Traffic:
    name = f"r{rows}_{str(dtype).removeprefix('torch.')}"
    case = Case(name, f"a vocabulary of {_FULL} cut to {_CUT}", _case(rows, _CUT, dtype=dtype))
    # what the second launch reads are the parts and one logit of each
    floors = {"sample_race_kernel": _race_bytes, "sample_finish_kernel": None}
    return Traffic("sample_rows", case, floors, scale=_FULL / _CUT)


TRAFFIC = (_rows_of(8, torch.float32), _rows_of(8, torch.bfloat16), _rows_of(64, torch.bfloat16))
