"""Launch knobs of the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dmtp_kernels.ops._variant import Variant


class CacheShape(NamedTuple):
    """What a program of one cache depends on."""

    heads: int
    dim: int
    itemsize: int
    """Of the rows."""
    copied: bool
    """No row is computed on."""


@dataclass(frozen=True)
class CommitConfig:
    """Knobs of the one launch."""

    rows: int
    """Rows of a request that one program holds; a request of more is cut into several programs."""
    heads: tuple[int, ...]
    """Per cache, heads of a row that one program holds."""
    scan: int
    """Writes of the call that are looked at together."""
    columns: int
    """Elements of the hidden of one program."""
    warps: int


MAX_SLOTS = 2**31 - 1
MAX_ROWS = 32
"""Rows of a request up to which all its reads come before its writes."""
# not measured: 8 KB are 16 registers a thread; two heads of 256 in the source's rounds of eight bf16 rows
_TILE = 8192
# rows x writes that are compared at once; 256 writes for eight rows would spill on sm_80
_COMPARED = 1024
_COLUMNS = 1024


def commit_config(width: int, caches: Sequence[CacheShape], interpreted: bool) -> CommitConfig:
    """The knobs for requests of `width` rows in every one of `caches`."""
    rows = min(_power(width), MAX_ROWS)
    if interpreted:
        # interpreted programs cost by their number
        return CommitConfig(rows, tuple(_power(c.heads) for c in caches), 256, 4096, 4)
    groups, warps = [], 4
    for heads, dim, itemsize, copied in caches:
        # rows in fp32 take twice the registers: whole tiles would spill on sm_80
        tile = _TILE // max(itemsize, 2) // (1 if copied else 2)
        groups.append(max(1, min(_power(heads), tile // (rows * _power(dim)))))
        if rows * groups[-1] * _power(dim) > tile:
            warps = 8
    return CommitConfig(rows, tuple(groups), min(128, _COMPARED // rows), _COLUMNS, warps)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


_STRIDES = "rows_k_b rows_k_r rows_k_h rows_v_b rows_v_r rows_v_h k_page k_row k_head v_page v_row v_head"
_SCALES = "k_scale_b k_scale_h v_scale_b v_scale_h"
_VECTORS = "valid_ptr pending_ptr promote_ptr scratch_ptr lengths_ptr positions_ptr"
_NAMES = (
    "rows_k rows_k_b rows_k_r rows_k_h rows_v rows_v_b rows_v_r rows_v_h k_caches k_page k_row k_head v_caches v_page "
    "v_row v_head valid_ptr valid_s live_ptr live_s dst dst_b pending_ptr pending_s promote_ptr promote_s scratch_ptr "
    "scratch_b hidden_ptr hidden_b hidden_r next_ptr next_b lengths_ptr lengths_s error_ptr error_s k_scales "
    "k_scale_b k_scale_h v_scales v_scale_b v_scale_h k_norms cos_sin_ptr cos_sin_row table_rows positions_ptr "
    "positions_b batch width num_slots first_slot hidden_size tiles"
)


def _variant(
    name: str,
    caches: Sequence[tuple[int, int, int]],
    *,
    width: int = 8,
    page_size: int = 1,
    dtype: str = "bf16",
    fp8: int = 0,
    hidden: bool = False,
    rounds: bool = True,
    rotary: int = 0,
    norm: bool = False,
    index: str = "i64",
    live: bool = False,
) -> Variant:
    """`caches`: layers, heads and dim of each; `rounds`: with pending slot and scratch, else the rows alone; `fp8`: its
    fraction bits."""
    size = {"fp64": 8, "fp32": 4}.get(dtype, 2)
    copied = not (fp8 or norm or rotary)
    config = commit_config(width, [CacheShape(heads, dim, size, copied) for _, heads, dim in caches], False)
    counts, heads, dims = zip(*caches, strict=True)
    count, layers = len(caches), sum(counts)
    starts = tuple(sum(counts[:c]) for c in range(count + 1))
    absent = [] if live else ["live_ptr"]
    absent += [] if rounds else ["pending_ptr", "promote_ptr", "scratch_ptr"]
    absent += [] if hidden else ["hidden_ptr", "next_ptr", "lengths_ptr"]
    absent += [] if fp8 else ["k_scales", "v_scales"]
    absent += [] if norm else ["k_norms"]
    absent += [] if rotary else ["cos_sin_ptr", "positions_ptr"]
    types: dict[str, str | tuple[str, ...]] = dict.fromkeys(_VECTORS.split(), f"*{index}")
    types |= {
        "hidden_ptr": f"*{dtype}",
        "next_ptr": f"*{dtype}",
        "error_ptr": "*i32",
        "live_ptr": "*i1",
        "cos_sin_ptr": "*fp32",
        "dst": (f"*{index}",) * count,
    }
    types |= {n: (f"*{dtype}",) * layers for n in ("rows_k", "rows_v")}
    types |= {n: ("*u8" if fp8 else f"*{dtype}",) * layers for n in ("k_caches", "v_caches")}
    types |= dict.fromkeys((*_STRIDES.split(), "dst_b", "num_slots", "first_slot"), ("i32",) * count)
    types |= dict.fromkeys(_SCALES.split(), ("i32",) * (layers if fp8 else 1))
    types |= dict.fromkeys(("k_scales", "v_scales"), ("*fp32",) * layers) | {"k_norms": (f"*{dtype}",) * layers}
    padded = tuple(_power(dim) for dim in dims)
    fixed = dict.fromkeys(absent) | {
        "EPS": 1e-6, "OFFSET": 0.0, "STARTS": starts, "PAGE": (page_size,) * count, "HEADS": heads, "DK": dims,
        "DV": dims, "GROUP": config.heads, "DKP": padded, "DVP": padded, "FP8_K": (fp8,) * count,
        "FP8_V": (fp8,) * count, "ROWS": config.rows, "SCAN": config.scan,
        "COLUMNS": config.columns if hidden else 16, "PARTS": 2 if hidden else 1, "ROTARY": rotary,
    }  # fmt: skip
    fixed |= dict.fromkeys(("SCALES_K", "SCALES_V"), starts if fp8 else (0,) * (count + 1))
    present = [n for n in _NAMES.split() if n not in fixed]
    unaligned = {*_VECTORS.split(), *_SCALES.split(), "k_scales", "v_scales", "error_ptr"}
    unaligned |= {"dst", "dst_b", "num_slots", "first_slot"}
    return Variant(
        name=f"commit_kv_kernel/{name}",
        kernel="dmtp_kernels.ops.commit_kv.kernels:commit_kv_kernel",
        signature={n: types.get(n, "i32") for n in present},
        constants=fixed,
        aligned=tuple(n for n in present if n in types and n not in unaligned),
        num_warps=config.warps,
        # a promoted row is an eighth of what is read, in pieces of 8 bytes where it is 512 bytes long
        streams=("rows_k", "rows_v"),
    )


def variants() -> tuple[Variant, ...]:
    """The source's models: one MTP layer with 2 heads of 256, drafters of 5 or 8 layers, targets of 48 with 4 or 8 of
    128; and rounds of the three, of a target whose 4 attention layers are committed here."""
    rows: dict[str, Any] = {"page_size": 16, "rounds": False}
    target, drafter, mtp = (4, 8, 128), (5, 8, 128), (1, 2, 256)
    return (
        _variant("mtp", [mtp], hidden=True, page_size=16),
        _variant("mtp_slots", [mtp], hidden=True),
        _variant("mtp_live_i32", [mtp], hidden=True, page_size=16, index="i32", live=True),
        _variant("mtp_fp8", [mtp], hidden=True, page_size=16, fp8=3),
        _variant("mtp_norm_rope", [mtp], hidden=True, page_size=16, norm=True, rotary=64),
        _variant("drafter5_norm_rope", [drafter], norm=True, rotary=128, **rows),
        _variant("drafter8_4", [(8, 4, 128)], **rows),
        _variant("drafter8_8", [(8, 8, 128)], **rows),
        _variant("drafter8_fp8", [(8, 4, 128)], fp8=3, norm=True, rotary=128, **rows),
        _variant("target48_4", [(48, 4, 128)], **rows),
        _variant("target48_8", [(48, 8, 128)], rounds=False),
        _variant("prefill256", [drafter], width=256, **rows),
        _variant("prefill256_norm_rope", [mtp], width=256, norm=True, rotary=64, **rows),
        _variant("mtp_fp32", [mtp], hidden=True, dtype="fp32", norm=True, rotary=64),
        _variant("target64_8_fp8", [(64, 8, 128)], rounds=False, fp8=3),
        _variant("round", [target, drafter, mtp], hidden=True),
        _variant("round_paged", [target, drafter, mtp], hidden=True, page_size=16),
        _variant("round_fp8", [target, drafter, mtp], hidden=True, page_size=16, fp8=3),
        _variant("round_mtp", [target, mtp], hidden=True),
        _variant("round_dflash", [target, drafter], rounds=False),
        _variant("round_fp32", [target, drafter, mtp], hidden=True, dtype="fp32"),
    )
