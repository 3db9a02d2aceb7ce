"""Schema, argument checks and dispatch of the commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels._library import Shape, define_op
from dmtp_kernels.ops._checks import FLOAT_DTYPES, INDEX_DTYPES, check_range, check_same_device, check_tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLAT = ("num_slots", "Hkv")
_PAGED = ("num_pages", "page_size", "Hkv")
_LIKE = {"B": "valid", "R": "dst", "Hkv": "rows_k[0]", "Dk": "rows_k[0]", "Dv": "rows_v[0]", "H": "hidden"}
_LIKE |= {"num_slots": "k_caches[0]", "num_pages": "k_caches[0]", "page_size": "k_caches[0]"}


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _check_layers(
    sizes: dict[str, int],
    kind: str,
    dim: str,
    rows: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    layers: int,
) -> None:
    for name, tensors in ((f"rows_{kind}", rows), (f"{kind}_caches", caches)):
        if len(tensors) != layers or layers == 0:
            wanted = f"{layers} like rows_k" if layers else "at least 1"
            raise ValueError(f"{name}: has {len(tensors)} layers, must be {wanted}")
    for layer, (row, cache) in enumerate(zip(rows, caches, strict=True)):
        if layer > 0 and _alike(row, rows[0]) and _alike(cache, caches[0]):
            continue
        check_tensor(f"rows_{kind}[{layer}]", row, ["B", "R", "Hkv", dim], [rows[0].dtype], sizes, like=_LIKE)
        shape = [*(_PAGED if cache.dim() == 4 else _FLAT), dim]
        check_tensor(f"{kind}_caches[{layer}]", cache, shape, [caches[0].dtype], sizes, like=_LIKE)
        if cache.dim() != caches[0].dim():
            raise ValueError(
                f"{kind}_caches[{layer}]: has {cache.dim()} dimensions, must be {caches[0].dim()} like layer 0"
            )
    for name, tensor, dtypes in (
        (f"rows_{kind}", rows[0], FLOAT_DTYPES),
        (f"{kind}_caches", caches[0], (*FLOAT_DTYPES, *FP8_DTYPES)),
    ):
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: dtype is {tensor.dtype}, must be one of {', '.join(map(str, dtypes))}")


def _check_scales(
    name: str, scales: Sequence[torch.Tensor] | None, cache: torch.Tensor, layers: int, sizes: dict[str, int]
) -> None:
    if scales is None:
        if cache.dtype in FP8_DTYPES:
            raise ValueError(f"{name}: is None, must be given for caches of {cache.dtype}")
        return
    _check_count(name, scales, layers)
    batch, heads = sizes["B"], sizes["Hkv"]
    for layer, scale in enumerate(scales):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name}[{layer}]: dtype is {scale.dtype}, must be torch.float32")
        if tuple(scale.shape) not in ((), (1,), (heads,), (batch, heads)):
            raise ValueError(
                f"{name}[{layer}]: shape is {tuple(scale.shape)}, must be [], [1], [{heads}] or [{batch}, {heads}]"
            )


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
            check_tensor(f"k_norm[{layer}]", weight, ["Dk"], [k_norm[0].dtype], sizes, like=_LIKE)
        if k_norm[0].dtype not in FLOAT_DTYPES:
            raise TypeError(f"k_norm: dtype is {k_norm[0].dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        check_range("k_norm_eps", k_norm_eps, 0)
    if cos_sin is not None and positions is not None:
        check_tensor("cos_sin", cos_sin, ["M", "rotary_dim"], FLOAT_DTYPES, sizes)
        check_tensor("positions", positions, ["B", "R"], INDEX_DTYPES, sizes, like=_LIKE)
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
    check_tensor("dst", dst, ["B", "R"], INDEX_DTYPES, sizes, like=_LIKE)
    if sizes["R"] < 1:
        raise ValueError("dst: has no rows, must have at least 1")
    _check_layers(sizes, "k", "Dk", rows_k, k_caches, len(rows_k))
    _check_layers(sizes, "v", "Dv", rows_v, v_caches, len(rows_k))
    if v_caches[0].dim() != k_caches[0].dim():
        raise ValueError(f"v_caches: has {v_caches[0].dim()} dimensions, must be {k_caches[0].dim()} like k_caches")

    for one, other, a, b in (
        ("pending_slot", "promote_dst", pending_slot, promote_dst),
        ("hidden", "next_hidden", hidden, next_hidden),
        ("cos_sin", "positions", cos_sin, positions),
    ):
        if (a is None) != (b is None):
            missing, given = (one, other) if a is None else (other, one)
            raise ValueError(f"{missing}: is None, must be given together with {given}")
    optional: list[tuple[str, torch.Tensor | None, list[str], Sequence[torch.dtype]]] = [
        ("pending_slot", pending_slot, ["B"], INDEX_DTYPES),
        ("promote_dst", promote_dst, ["B"], INDEX_DTYPES),
        ("scratch_dst", scratch_dst, ["B", "R"], INDEX_DTYPES),
        ("hidden", hidden, ["B", "R", "H"], FLOAT_DTYPES),
        ("next_hidden", next_hidden, ["B", "H"], FLOAT_DTYPES if hidden is None else [hidden.dtype]),
        ("lengths", lengths, ["B"], INDEX_DTYPES),
        ("live", live, ["B"], [torch.bool]),
    ]
    named: dict[str, torch.Tensor | None] = {}
    for name, tensor, shape, dtypes in optional:
        if tensor is not None:
            # one number per request may be a column of an engine's table
            check_tensor(name, tensor, shape, dtypes, sizes, last_contiguous=len(shape) > 1, like=_LIKE)
            named[name] = tensor
    check_range("first_slot", first_slot, 0)
    _check_scales("k_scale", k_scale, k_caches[0], len(rows_k), sizes)
    _check_scales("v_scale", v_scale, v_caches[0], len(rows_k), sizes)
    _check_transform(k_norm, k_norm_eps, cos_sin, positions, len(rows_k), sizes)
    check_same_device("valid", valid.device, dst=dst, cos_sin=cos_sin, positions=positions, **named)
    device = valid.device
    lists = {"rows_k": rows_k, "rows_v": rows_v, "k_caches": k_caches, "v_caches": v_caches}
    lists |= {"k_scale": k_scale or (), "v_scale": v_scale or (), "k_norm": k_norm or ()}
    for label, tensors in lists.items():
        # names cost more than the check
        if any(tensor.device != device for tensor in tensors):
            named = {f"{label}[{layer}]": tensor for layer, tensor in enumerate(tensors)}
            check_same_device("valid", device, **named)


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
    },
)
