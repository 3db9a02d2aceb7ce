"""Launch knobs of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._variant import Variant

# bits of a fp32 key that a narrower dtype's upper bits determine, and the bits left
_DROPPED = {torch.bfloat16: 16, torch.float16: 12}
_KEY_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32, torch.float64: 64}


def power_of_two(n: int) -> int:
    """The least power of two that is `n` or more."""
    return 1 << max(0, n - 1).bit_length()


def _unfused() -> dict[str, Any]:
    # a product and a sum round separately, as in the reference
    return {"enable_fp_fusion": False}


def kind_of(dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments that say how the kernels read logits of a dtype."""
    return {"DROP": _DROPPED.get(dtype, 0), "FP64": dtype == torch.float64}


@dataclass(frozen=True)
class RaceConfig:
    """Knobs of the race; the token does not depend on them."""

    columns: int
    """Entries of one program: a power of two, 4 at least."""
    warps: int
    finish_warps: int = 1
    options: dict[str, Any] = field(default_factory=_unfused)

    def kind(self, dtype: torch.dtype) -> dict[str, Any]:
        """As `kind_of`."""
        return kind_of(dtype)


@dataclass(frozen=True)
class CutConfig:
    """Knobs of the search for what the filters keep, one program a row."""

    columns: int
    warps: int
    options: dict[str, Any] = field(default_factory=_unfused)

    def digits(self, dtype: torch.dtype) -> int:
        """Passes over a row, one for every four bits of its keys."""
        return _KEY_BITS[dtype] // 4


# not measured: sixteen float64 scores a thread; 248,320 entries of 8 rows are 976 programs for 132 processors
_RACE_COLUMNS, _RACE_WARPS = 2048, 4
# not measured: one entry a thread in sixteen int64 sums
_CUT = CutConfig(columns=512, warps=16)


def race_config(num_valid: int, device: torch.device) -> RaceConfig:
    """The knobs for rows of `num_valid` entries."""
    width = max(4, power_of_two(num_valid))
    if not processors(device):  # interpreted programs cost by their number
        return RaceConfig(columns=min(width, 8 * _RACE_COLUMNS), warps=4)
    columns = min(width, _RACE_COLUMNS)
    return RaceConfig(columns=columns, warps=max(1, min(_RACE_WARPS, columns // 128)), finish_warps=4)


def cut_config(num_valid: int, device: torch.device) -> CutConfig:
    """The knobs for rows of `num_valid` entries."""
    width = max(4, power_of_two(num_valid))
    if not processors(device):
        return CutConfig(columns=min(width, 8192), warps=4)
    return _CUT if width >= _CUT.columns else CutConfig(columns=width, warps=max(1, width // 32))


_RACE = (
    "logits_ptr row_stride temperature_ptr top_p_ptr seed_ptr position_ptr cut_key_ptr cut_id_ptr num_valid stream "
    "splits top_ptr first_ptr winner_ptr nan_ptr token_ptr token_stride status_ptr status_stride"
)
_FINISH = (
    "logits_ptr row_stride temperature_ptr top_p_ptr seed_ptr position_ptr stream splits top_ptr first_ptr winner_ptr "
    "nan_ptr token_ptr token_stride status_ptr status_stride"
)
_CUT_ARGUMENTS = (
    "logits_ptr outer_stride row_stride temperature_ptr top_k_ptr top_p_ptr num_valid rows_of_request unit key_ptr "
    "id_ptr"
)
_TYPES = {
    "temperature_ptr": "*fp32",
    "top_p_ptr": "*fp32",
    "top_k_ptr": "*i64",
    "seed_ptr": "*i64",
    "position_ptr": "*i64",
    "cut_key_ptr": "*u64",
    "key_ptr": "*u64",
    "cut_id_ptr": "*i64",
    "id_ptr": "*i64",
    "top_ptr": "*fp64",
    "first_ptr": "*i64",
    "winner_ptr": "*i64",
    "nan_ptr": "*i32",
    "token_ptr": "*i64",
    "status_ptr": "*i32",
    "unit": "fp32",
}
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def _variant(
    name: str, step: str, names: str, dtype: str, absent: str, constants: dict[str, Any], warps: int
) -> Variant:
    ones = [n for n in ("token_stride", "status_stride") if n in names]  # a stride of 1 is compiled in
    missing = absent.split()
    present = [n for n in names.split() if n not in missing and n not in ones]
    module = "kernels_cut" if step == "cut" else "kernels"
    return Variant(
        name=f"sample_{step}_kernel/{name}",
        kernel=f"dmtp_kernels.ops.sample.{module}:sample_{step}_kernel",
        signature={n: _TYPES.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in present},
        constants=dict.fromkeys(missing) | dict.fromkeys(ones, 1) | constants,
        aligned=tuple(n for n in ("logits_ptr", "row_stride", "outer_stride", "num_valid") if n in present),
        num_warps=warps,
        options=_unfused(),
        streams=("logits_ptr",) if constants.get("SINGLE") is False else (),
    )


def _variants_of(dtype: str) -> list[Variant]:
    kind, width = kind_of(_TORCH[dtype]), 248_320
    race = {**kind, "SINGLE": False, "N": _RACE_COLUMNS}
    plain, splits = "top_p_ptr cut_key_ptr cut_id_ptr", power_of_two(-(-width // _RACE_COLUMNS))
    digits = {**kind, "DIGITS": _CUT.digits(_TORCH[dtype]), "N": _CUT.columns}
    return [
        _variant(f"{dtype}", "race", _RACE, dtype, plain, race, _RACE_WARPS),
        _variant(f"{dtype}_cut", "race", _RACE, dtype, "", race, _RACE_WARPS),
        _variant(f"{dtype}_single", "race", _RACE, dtype, "", {**race, "SINGLE": True, "N": 512}, 4),
        _variant(f"{dtype}", "finish", _FINISH, dtype, "", {"W": splits}, 4),
        _variant(f"{dtype}", "cut", _CUT_ARGUMENTS, dtype, "", digits, _CUT.warps),
    ]


def variants() -> tuple[Variant, ...]:
    """Every kernel at a vocabulary of 248,320, and the one launch of a byte vocabulary."""
    return (*_variants_of("fp32"), *_variants_of("bf16"), *_variants_of("fp16"), *_variants_of("fp64"))
