"""Launch knobs of the commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmtp_kernels.ops._variant import Variant


@dataclass(frozen=True)
class CommitConfig:
    """Knobs of the one launch."""

    rows: int
    """Rows of a request that one program holds; a request of more is cut into several programs."""
    heads: int
    """Heads of a row that one program holds."""
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


def commit_config(width: int, heads: int, dim: int, itemsize: int, copied: bool, interpreted: bool) -> CommitConfig:
    """The knobs for requests of `width` rows of `heads` heads of `dim` elements; `copied`: none is computed on."""
    rows = min(_power(width), MAX_ROWS)
    if interpreted:
        # interpreted programs cost by their number
        return CommitConfig(rows, _power(heads), 256, 4096, 4)
    # rows in fp32 take twice the registers: whole tiles would spill on sm_80
    tile = _TILE // max(itemsize, 2) // (1 if copied else 2)
    group = max(1, min(_power(heads), tile // (rows * _power(dim))))
    warps = 8 if rows * group * _power(dim) > tile else 4
    return CommitConfig(rows, group, min(128, _COMPARED // rows), _COLUMNS, warps)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


_STRIDES = "rows_k_b rows_k_r rows_k_h rows_v_b rows_v_r rows_v_h k_page k_row k_head v_page v_row v_head"
_VECTORS = "valid_ptr dst_ptr pending_ptr promote_ptr scratch_ptr lengths_ptr positions_ptr"
_NAMES = (
    "rows_k rows_k_b rows_k_r rows_k_h rows_v rows_v_b rows_v_r rows_v_h k_caches k_page k_row k_head v_caches v_page "
    "v_row v_head valid_ptr valid_s dst_ptr dst_b pending_ptr pending_s promote_ptr promote_s scratch_ptr scratch_b "
    "live_ptr live_s hidden_ptr hidden_b hidden_r next_ptr next_b lengths_ptr lengths_s error_ptr error_s k_scales "
    "k_scale_b k_scale_h v_scales v_scale_b v_scale_h k_norms cos_sin_ptr cos_sin_row table_rows positions_ptr "
    "positions_b batch width num_slots first_slot hidden_size tiles"
)


def _variant(
    name: str,
    layers: int,
    heads: int,
    dim: int,
    *,
    width: int = 8,
    page_size: int = 1,
    dtype: str = "bf16",
    fp8: str | None = None,
    hidden: bool = False,
    rounds: bool = True,
    rotary: int = 0,
    norm: bool = False,
    index: str = "i64",
    live: bool = False,
) -> Variant:
    """`rounds`: with pending slot and scratch, else the rows alone."""
    size = {"fp64": 8, "fp32": 4}.get(dtype, 2)
    config = commit_config(width, heads, dim, size, not (fp8 or norm or rotary), False)
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
    }
    types |= {n: (f"*{dtype}",) * layers for n in ("rows_k", "rows_v")}
    types |= {n: ("*u8" if fp8 else f"*{dtype}",) * layers for n in ("k_caches", "v_caches")}
    types |= dict.fromkeys(_STRIDES.split(), ("i32",))
    types |= dict.fromkeys(("k_scale_b", "k_scale_h", "v_scale_b", "v_scale_h"), ("i32",))
    types |= dict.fromkeys(("k_scales", "v_scales"), ("*fp32",) * layers) | {"k_norms": (f"*{dtype}",) * layers}
    fixed = dict.fromkeys(absent) | {
        "EPS": 1e-6, "OFFSET": 0.0, "PAGE": page_size, "HEADS": heads, "DK": dim, "DV": dim, "ROWS": config.rows,
        "GROUP": config.heads, "DKP": _power(dim), "DVP": _power(dim), "SCAN": config.scan,
        "COLUMNS": config.columns if hidden else 16, "PARTS": 2 if hidden else 1, "ROTARY": rotary,
        "FP8_K": fp8, "FP8_V": fp8,
    }  # fmt: skip
    present = [n for n in _NAMES.split() if n not in fixed]
    return Variant(
        name=f"commit_kv_kernel/{name}",
        kernel="dmtp_kernels.ops.commit_kv.kernels:commit_kv_kernel",
        signature={n: types.get(n, "i32") for n in present},
        constants=fixed,
        aligned=tuple(
            n for n in present if n in types and n not in _VECTORS.split() and "scale" not in n and n != "error_ptr"
        ),
        num_warps=config.warps,
        # a promoted row is an eighth of what is read, in pieces of 8 bytes where it is 512 bytes long
        streams=("rows_k", "rows_v"),
    )


def variants() -> tuple[Variant, ...]:
    """The source's models: one MTP layer with 2 heads of 256, drafters of 5 or 8 layers, targets of 48 with 4 or 8 of
    128."""
    drafter: dict[str, Any] = {"page_size": 16, "rounds": False}
    return (
        _variant("mtp", 1, 2, 256, hidden=True, page_size=16),
        _variant("mtp_slots", 1, 2, 256, hidden=True),
        _variant("mtp_live_i32", 1, 2, 256, hidden=True, page_size=16, index="i32", live=True),
        _variant("mtp_fp8", 1, 2, 256, hidden=True, page_size=16, fp8="e4m3"),
        _variant("mtp_norm_rope", 1, 2, 256, hidden=True, page_size=16, norm=True, rotary=64),
        _variant("drafter5_norm_rope", 5, 8, 128, norm=True, rotary=128, **drafter),
        _variant("drafter8_4", 8, 4, 128, **drafter),
        _variant("drafter8_8", 8, 8, 128, **drafter),
        _variant("drafter8_fp8", 8, 4, 128, fp8="e4m3", norm=True, rotary=128, **drafter),
        _variant("target48_4", 48, 4, 128, **drafter),
        _variant("target48_8", 48, 8, 128, rounds=False),
        _variant("prefill256", 5, 8, 128, width=256, **drafter),
        _variant("prefill256_norm_rope", 1, 2, 256, width=256, norm=True, rotary=64, **drafter),
        _variant("mtp_fp32", 1, 2, 256, hidden=True, dtype="fp32", norm=True, rotary=64),
        _variant("target64_8_fp8", 64, 8, 128, rounds=False, fp8="e4m3"),
    )
