"""Schema, argument checks and dispatch of the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache as cached

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import FLOAT_DTYPES, INDEX_DTYPES, check_range, check_same_device, check_tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLAT = ("num_slots", "Hkv")
_PAGED = ("num_pages", "page_size", "Hkv")


@cached
def like(first: int, dst: str) -> Mapping[str, str]:
    """Which argument each symbol comes from, for the layers of a cache that begin at number `first`."""
    named = {"B": "valid", "R": dst, "Hkv": f"rows_k[{first}]", "Dk": f"rows_k[{first}]", "Dv": f"rows_v[{first}]"}
    named |= dict.fromkeys(("num_slots", "num_pages", "page_size"), f"k_caches[{first}]")
    return named | {"H": "hidden"}


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def check_layers(
    sizes: dict[str, int],
    kind: str,
    rows: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    first: int,
    last: int,
    dst: str = "dst",
) -> None:
    """K or V of layers `first` .. `last - 1`, which belong to one cache; binds or checks `sizes`."""
    dim = f"D{kind}"
    first_row, first_cache = rows[first], caches[first]
    for layer in range(first, last):
        row, cache = rows[layer], caches[layer]
        if layer > first and _alike(row, first_row) and _alike(cache, first_cache):
            continue
        named = like(first, dst)
        check_tensor(f"rows_{kind}[{layer}]", row, ["B", "R", "Hkv", dim], [first_row.dtype], sizes, like=named)
        shape = [*(_PAGED if cache.dim() == 4 else _FLAT), dim]
        check_tensor(f"{kind}_caches[{layer}]", cache, shape, [first_cache.dtype], sizes, like=named)
        if cache.dim() != first_cache.dim():
            raise ValueError(
                f"{kind}_caches[{layer}]: has {cache.dim()} dimensions, must be {first_cache.dim()} like layer {first}"
            )
    at = f"[{first}]" if first else ""
    for name, tensor, dtypes in (
        (f"rows_{kind}{at}", first_row, FLOAT_DTYPES),
        (f"{kind}_caches{at}", first_cache, (*FLOAT_DTYPES, *FP8_DTYPES)),
    ):
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: dtype is {tensor.dtype}, must be one of {', '.join(map(str, dtypes))}")


def check_lengths(layers: int, **lists: Sequence[torch.Tensor]) -> None:
    """Every list has as many layers as `rows_k`, and at least one."""
    for name, tensors in lists.items():
        if len(tensors) != layers or layers == 0:
            wanted = f"{layers} like rows_k" if layers else "at least 1"
            raise ValueError(f"{name}: has {len(tensors)} layers, must be {wanted}")


def check_scale(name: str, scale: torch.Tensor, sizes: dict[str, int]) -> None:
    """fp32, of a shape that goes to requests and heads."""
    batch, heads = sizes["B"], sizes["Hkv"]
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: dtype is {scale.dtype}, must be torch.float32")
    if tuple(scale.shape) not in ((), (1,), (heads,), (batch, heads)):
        raise ValueError(f"{name}: shape is {tuple(scale.shape)}, must be [], [1], [{heads}] or [{batch}, {heads}]")


def check_pairs(pairs: Sequence[tuple[str, torch.Tensor | None, str, torch.Tensor | None]]) -> None:
    """Tensors that are given together or not at all."""
    for one, a, other, b in pairs:
        if (a is None) != (b is None):
            missing, given = (one, other) if a is None else (other, one)
            raise ValueError(f"{missing}: is None, must be given together with {given}")


def check_optional(
    sizes: dict[str, int],
    dst: str,
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """What a commit may do besides placing rows; returns the tensors that are given."""
    optional: list[tuple[str, torch.Tensor | None, list[str], Sequence[torch.dtype]]] = [
        ("pending_slot", pending_slot, ["B"], INDEX_DTYPES),
        ("promote_dst", promote_dst, ["B"], INDEX_DTYPES),
        ("scratch_dst", scratch_dst, ["B", "R"], INDEX_DTYPES),
        ("hidden", hidden, ["B", "R", "H"], FLOAT_DTYPES),
        ("next_hidden", next_hidden, ["B", "H"], FLOAT_DTYPES if hidden is None else [hidden.dtype]),
        ("lengths", lengths, ["B"], INDEX_DTYPES),
        ("live", live, ["B"], [torch.bool]),
    ]
    named: dict[str, torch.Tensor] = {}
    for name, tensor, shape, dtypes in optional:
        if tensor is not None:
            # one number per request may be a column of an engine's table
            check_tensor(name, tensor, shape, dtypes, sizes, last_contiguous=len(shape) > 1, like=like(0, dst))
            named[name] = tensor
    return named


def check_devices(device: torch.device, **lists: Sequence[torch.Tensor]) -> None:
    """Every tensor of every list lives on the device of `valid`."""
    for label, tensors in lists.items():
        # names cost more than the check
        if any(tensor.device != device for tensor in tensors):
            check_same_device("valid", device, **{f"{label}[{i}]": tensor for i, tensor in enumerate(tensors)})


def _check_scales(
    name: str, scales: Sequence[torch.Tensor] | None, cache: torch.Tensor, layers: int, sizes: dict[str, int]
) -> None:
    if scales is None:
        if cache.dtype in FP8_DTYPES:
            raise ValueError(f"{name}: is None, must be given for caches of {cache.dtype}")
        return
    _check_count(name, scales, layers)
    for layer, scale in enumerate(scales):
        check_scale(f"{name}[{layer}]", scale, sizes)


def _check_count(name: str, tensors: Sequence[torch.Tensor], layers: int) -> None:
    if len(tensors) not in (1, layers):
        raise ValueError(f"{name}: has {len(tensors)} tensors, must be 1 or the {layers} of rows_k")


def _check_transform(
    k_norm: Sequence[torch.Tensor] | None,
    k_norm_eps: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    layers: int,
    sizes: dict[str, int],
) -> None:
    if k_norm is not None:
        _check_count("k_norm", k_norm, layers)
        for layer, weight in enumerate(k_norm):
            check_tensor(f"k_norm[{layer}]", weight, ["Dk"], [k_norm[0].dtype], sizes, like=like(0, "dst"))
        if k_norm[0].dtype not in FLOAT_DTYPES:
            raise TypeError(f"k_norm: dtype is {k_norm[0].dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        check_range("k_norm_eps", k_norm_eps, 0)
    if cos_sin is not None and positions is not None:
        check_tensor("cos_sin", cos_sin, ["M", "rotary_dim"], FLOAT_DTYPES, sizes)
        check_tensor("positions", positions, ["B", "R"], INDEX_DTYPES, sizes, like=like(0, "dst"))
        if sizes["M"] < 1:
            raise ValueError("cos_sin: has no rows, must have at least 1")
        if sizes["rotary_dim"] % 2 or sizes["rotary_dim"] > sizes["Dk"]:
            raise ValueError(
                f"cos_sin: dimension 1 (rotary_dim) is {sizes['rotary_dim']}, must be even and at most {sizes['Dk']}"
            )


def _check(
    rows_k: Sequence[torch.Tensor],
    rows_v: Sequence[torch.Tensor],
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    valid: torch.Tensor,
    dst: torch.Tensor,
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
    first_slot: int,
    k_scale: Sequence[torch.Tensor] | None,
    v_scale: Sequence[torch.Tensor] | None,
    k_norm: Sequence[torch.Tensor] | None,
    k_norm_eps: float,
    k_norm_offset: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_tensor("valid", valid, ["B"], INDEX_DTYPES, sizes, last_contiguous=False)
    check_tensor("dst", dst, ["B", "R"], INDEX_DTYPES, sizes, like=like(0, "dst"))
    if sizes["R"] < 1:
        raise ValueError("dst: has no rows, must have at least 1")
    check_lengths(len(rows_k), rows_k=rows_k, k_caches=k_caches, rows_v=rows_v, v_caches=v_caches)
    check_layers(sizes, "k", rows_k, k_caches, 0, len(rows_k))
    check_layers(sizes, "v", rows_v, v_caches, 0, len(rows_k))
    if v_caches[0].dim() != k_caches[0].dim():
        raise ValueError(f"v_caches: has {v_caches[0].dim()} dimensions, must be {k_caches[0].dim()} like k_caches")
    check_pairs(
        [
            ("pending_slot", pending_slot, "promote_dst", promote_dst),
            ("hidden", hidden, "next_hidden", next_hidden),
            ("cos_sin", cos_sin, "positions", positions),
        ]
    )
    named = check_optional(sizes, "dst", pending_slot, promote_dst, scratch_dst, hidden, next_hidden, lengths, live)
    check_range("first_slot", first_slot, 0)
    _check_scales("k_scale", k_scale, k_caches[0], len(rows_k), sizes)
    _check_scales("v_scale", v_scale, v_caches[0], len(rows_k), sizes)
    _check_transform(k_norm, k_norm_eps, cos_sin, positions, len(rows_k), sizes)
    check_same_device("valid", valid.device, dst=dst, cos_sin=cos_sin, positions=positions, **named)
    check_devices(
        valid.device, rows_k=rows_k, rows_v=rows_v, k_caches=k_caches, v_caches=v_caches,
        k_scale=k_scale or (), v_scale=v_scale or (), k_norm=k_norm or (),
    )  # fmt: skip


def _shapes(
    rows_k: object, rows_v: object, k_caches: object, v_caches: object, valid: torch.Tensor, *_: object
) -> list[Shape]:
    return [((valid.shape[0],), torch.int32)]


COMMIT_KV = define_op(
    "commit_kv",
    args=(
        "Tensor[] rows_k, Tensor[] rows_v, Tensor(w!)[] k_caches, Tensor(x!)[] v_caches, Tensor valid, Tensor dst, *, "
        "Tensor? pending_slot=None, Tensor? promote_dst=None, Tensor? scratch_dst=None, Tensor? hidden=None, "
        "Tensor(y!)? next_hidden=None, Tensor(z!)? lengths=None, Tensor? live=None, int first_slot=0, "
        "Tensor[]? k_scale=None, Tensor[]? v_scale=None, Tensor[]? k_norm=None, float k_norm_eps=1e-06, "
        "float k_norm_offset=0.0, Tensor? cos_sin=None, Tensor? positions=None"
    ),
    outs=("error",),
    shapes=_shapes,
    check=_check,
    implementations={
        "reference": "dmtp_kernels.ops.commit_kv.reference:commit_kv",
        "cpu": "dmtp_kernels.ops.commit_kv.cpu:commit_kv",
        "triton": "dmtp_kernels.ops.commit_kv.launch:commit_kv",
        "cuda": "dmtp_kernels.ops.commit_kv.cuda:commit_kv",
    },
)
