"""Inputs and traffic of the commit of all caches, made of those of one cache each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes
from dmtp_kernels.ops.commit_kv.round_layers import cache_layers
from dmtp_kernels.ops.commit_kv.spec_cache import cache_case, floor_bytes, full_case

_Make = Callable[[torch.Generator], tuple[Any, ...]]


def _together(*makes: _Make) -> _Make:
    """One call for the caches of several `commit_kv` calls; the last one's pending slots, counts and hidden."""

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        made = [m(generator) for m in makes]
        layers = [len(m[0]) for m in made]
        lists = [[tensor for m in made for tensor in m[i]] for i in range(4)]
        scales = [_of_all(layers, [m[i] for m in made]) for i in (14, 15)]
        return (*lists, made[-1][4], [m[5] for m in made], layers, *made[-1][6:13], [m[13] for m in made], *scales)

    return make


def _of_all(layers: Sequence[int], scales: Sequence[list[torch.Tensor] | None]) -> list[torch.Tensor] | None:
    """One a layer, empty where there is none."""
    if all(s is None for s in scales):
        return None
    lists = [s or [torch.empty(0)] for s in scales]
    return [t for count, s in zip(layers, lists, strict=True) for t in (s if len(s) == count else s * count)]


def _floor_bytes(*inputs: Any) -> int:
    lists, valid, dst, layers, tail, live = inputs[:4], inputs[4], inputs[5], inputs[6], inputs[7:13], inputs[13]
    total = 0
    for own in cache_layers(layers):
        rows_and_caches = [tensors[own.first : own.last] for tensors in lists]
        last = own.index == len(layers) - 1
        scales = [own.scales(s) for s in inputs[15:17]]
        mine = tail if last else (None,) * 6
        total += floor_bytes(
            *rows_and_caches, valid, dst[own.index], *mine, live, 0, *scales, None, 1e-6, 0.0, None, None
        )
    return total - (len(layers) - 1) * (nbytes(valid, live) + 4 * len(valid))


_TARGET = cache_case(3, heads=1, dims=(8, 24), layers=2, pending=False, dtype=torch.bfloat16, page_size=2)
_DRAFTER = cache_case(3, heads=3, dims=(12, 12), layers=3, pending=False, index=torch.int32, packed=True)

ROUND = Spec(
    op="commit_round",
    cases=(
        Case("round", "three caches that agree in nothing", _together(_TARGET, _DRAFTER, cache_case(3))),
        Case("draftless", "the target's cache and MTP's", _together(_TARGET, cache_case(3, page_size=4))),
        Case(
            "scaled",
            "one cache of two has scales",
            _together(_DRAFTER, cache_case(3, page_size=4, dtype=torch.bfloat16, scaled=True)),
        ),
        Case("dflash", "target and drafter, no pending slot", _together(_TARGET, _DRAFTER)),
        Case("autoregressive", "the target alone, one row", _together(cache_case(5, rows=1, pending=False))),
        Case("empty", "no request", _together(cache_case(0, pending=False, heads=3), cache_case(0))),
    ),
    floor_bytes=_floor_bytes,
    flops=lambda *_: 0,
    exact=True,
)


def _traffic(name: str, why: str, *makes: _Make) -> Traffic:
    return Traffic("commit_round", Case(name, why, _together(*makes)), {"commit_kv_kernel": _floor_bytes})


_E4M3 = torch.float8_e4m3fn
TRAFFIC = (
    _traffic(
        "round",
        "2 requests: target of 4 layers and drafter of 5 of 8 heads of 128, one MTP layer of 2 heads of 256",
        full_case(2, 8, 128, 4, rounds=False),
        full_case(2, 8, 128, 5, rounds=False),
        full_case(2, 2, 256, 1),
    ),
    _traffic(
        "round_fp8",
        "one request of them, caches in e4m3fn",
        full_case(1, 8, 128, 4, rounds=False, fp8=_E4M3),
        full_case(1, 8, 128, 5, rounds=False, fp8=_E4M3),
        full_case(1, 2, 256, 1, fp8=_E4M3),
    ),
)
