"""Schema, argument checks and dispatch of block attention."""

from __future__ import annotations

import math

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import FLOAT_DTYPES, INDEX_DTYPES, check_choice, check_same_device, check_tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
WINDOW_REFS = ("anchor", "query")
_LIKE = {"D": "q", "P": "k_cache", "pages": "k_cache", "Hkv": "k_cache"}
_BLOCK_LIKE = {**_LIKE, "dtype": "q", "B": "q", "Sb": "block_k"}


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    block_k: torch.Tensor | None,
    block_v: torch.Tensor | None,
    block_len: torch.Tensor | None,
    window: int | None,
    window_ref: str,
    block_causal: bool,
    valid_from: torch.Tensor | None,
    scale: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sink: torch.Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_tensor("q", q, ["B", "S", "Hq", "D"], FLOAT_DTYPES, sizes)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype == torch.uint8:
            raise TypeError(f"{name}: dtype is torch.uint8, fp8 codes must come as {name}.view(torch.float8_e4m3fn)")
        check_tensor(name, cache, ["pages", "P", "Hkv", "D"], (q.dtype, *FP8_DTYPES), sizes, like=_LIKE)
    for name, symbol in (("q", "Hq"), ("q", "D"), ("k_cache", "P"), ("k_cache", "Hkv")):
        if sizes[symbol] < 1:
            raise ValueError(f"{name}: {symbol} is {sizes[symbol]}, must be at least 1")
    if sizes["Hq"] % sizes["Hkv"] != 0:
        raise ValueError(f"q: has {sizes['Hq']} heads, must be a multiple of {_heads_of(k_cache)}")
    check_tensor("page_table", page_table, ["B", "MP"], INDEX_DTYPES, sizes)
    check_tensor("ctx_len", ctx_len, ["B"], INDEX_DTYPES, sizes)
    if (block_k is None) != (block_v is None):
        missing, given = ("block_k", "block_v") if block_k is None else ("block_v", "block_k")
        raise ValueError(f"{missing}: is None, must be given together with {given}")
    if block_k is not None and block_v is not None:
        for name, block in (("block_k", block_k), ("block_v", block_v)):
            if block.dim() == 4 and block.shape[2] != sizes["Hkv"]:
                raise ValueError(f"{name}: has {block.shape[2]} heads, must have {_heads_of(k_cache)}")
            check_tensor(name, block, ["B", "Sb", "Hkv", "D"], (q.dtype,), sizes, like=_BLOCK_LIKE)
        if sizes["Sb"] < sizes["S"]:
            raise ValueError(f"block_k: has {sizes['Sb']} rows, must have at least the {sizes['S']} of q")
    for name, tensor in (("block_len", block_len), ("valid_from", valid_from)):
        if tensor is not None:
            check_tensor(name, tensor, ["B"], INDEX_DTYPES, sizes)
    if sink is not None:
        check_tensor("sink", sink, ["Hq"], FLOAT_DTYPES, sizes)
    for name, cache, factor in (("k_scale", k_cache, k_scale), ("v_scale", v_cache, v_scale)):
        if factor is not None:
            _check_scale(name, factor, sizes)
        elif cache.dtype in FP8_DTYPES:
            raise ValueError(f"{name}: is None, must be given for a cache of {cache.dtype}")
    check_choice("window_ref", window_ref, WINDOW_REFS)
    if window is not None and window < 0:
        raise ValueError(f"window: is {window}, must be None (no limit) or at least 0")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: is {scale}, must be finite")
    if soft_cap is not None and not 1e-30 <= soft_cap <= 1e30:
        raise ValueError(f"soft_cap: is {soft_cap}, must be None (off) or between 1e-30 and 1e30")
    check_same_device(
        "q",
        q.device,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        ctx_len=ctx_len,
        block_k=block_k,
        block_v=block_v,
        block_len=block_len,
        valid_from=valid_from,
        k_scale=k_scale,
        v_scale=v_scale,
        sink=sink,
    )


def _heads_of(k_cache: torch.Tensor) -> str:
    # a cache with heads before rows shows here first
    return f"the {k_cache.shape[2]} of k_cache, which is {tuple(k_cache.shape)} and must be [pages, P, Hkv, D]"


def _check_scale(name: str, factor: torch.Tensor, sizes: dict[str, int]) -> None:
    if factor.dtype != torch.float32:
        raise TypeError(f"{name}: dtype is {factor.dtype}, must be torch.float32")
    batch, heads = sizes["B"], sizes["Hkv"]
    if tuple(factor.shape) not in ((), (1,), (heads,), (batch, heads)):
        raise ValueError(f"{name}: shape is {tuple(factor.shape)}, must be [], [1], [{heads}] or [{batch}, {heads}]")


def _shapes(q: torch.Tensor, *_: object) -> list[Shape]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [(tuple(q.shape), q.dtype), (tuple(q.shape[:3]), lse_dtype)]


BLOCK_ATTENTION = define_op(
    "block_attention",
    args=(
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor ctx_len, *, Tensor? block_k=None, "
        "Tensor? block_v=None, Tensor? block_len=None, int? window=None, str window_ref='anchor', "
        "bool block_causal=False, Tensor? valid_from=None, float? scale=None, Tensor? k_scale=None, "
        "Tensor? v_scale=None, float? soft_cap=None, Tensor? sink=None"
    ),
    outs=("out", "lse"),
    shapes=_shapes,
    check=_check,
    implementations={
        "reference": "dmtp_kernels.ops.block_attention.reference:block_attention",
        "cpu": "dmtp_kernels.ops.block_attention.cpu:block_attention",
        "flash": "dmtp_kernels.ops.block_attention.flash:block_attention",
        "triton": "dmtp_kernels.ops.block_attention.launch:block_attention",
        "cuda": "dmtp_kernels.ops.block_attention.cuda:block_attention",
    },
)
