"""Launch knobs of the acceptance rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._variant import Variant
from dmtp_kernels.ops.sample.config import kind_of, power_of_two


@dataclass(frozen=True)
class PrefixConfig:
    """Knobs of the launch of `accept_prefix`."""

    requests: int
    """Requests of one program."""
    columns: int
    """Lanes of one request's rows: a power of two."""
    warps: int = 1


_LANES = 32


def prefix_config(rows: int, device: torch.device) -> PrefixConfig:
    """The knobs for `rows` verify rows."""
    columns = power_of_two(rows)
    # not measured: one warp, whose lanes hold four requests of eight rows; interpreted programs cost by their number
    lanes = _LANES if processors(device) else 32 * _LANES
    return PrefixConfig(requests=max(1, lanes // columns), columns=columns)


def _unfused() -> dict[str, Any]:
    # a product and a sum round separately, as in the reference
    return {"enable_fp_fusion": False}


@dataclass(frozen=True)
class SampledConfig:
    """Knobs of the launches of `accept_rejection` and `accept_block`; decisions do not depend on the batch."""

    columns: int
    """Entries of a row that one program reads: a power of two, 4 at least."""
    warps: int
    finish_warps: int
    options: dict[str, Any] = field(default_factory=_unfused)


# not measured: eight entries a thread, sixteen spill; 248,320 entries of 8 rows are 976 programs for 132 processors
_COLUMNS, _WARPS = 2048, 8
# not measured: one vector of the parts' results; each number spills with the other's rule
_FINISH_WARPS = {False: 4, True: 2}


def sampled_config(vocab: int, block: bool, device: torch.device) -> SampledConfig:
    """The knobs for rows of `vocab` entries, for block verification or rejection sampling."""
    width = max(4, power_of_two(vocab))
    if not processors(device):  # interpreted programs cost by their number
        return SampledConfig(columns=min(width, 8 * _COLUMNS), warps=4, finish_warps=1)
    columns = min(width, _COLUMNS)
    return SampledConfig(columns=columns, warps=max(1, min(_WARPS, columns // 128)), finish_warps=_FINISH_WARPS[block])


_PREFIX = (
    "candidates_ptr candidates_stride target_ptr target_stride stop_ptr stop_stride num_stop budget_ptr count_ptr "
    "accept_ptr commit_ptr bonus_ptr out_ptr finished_ptr accept_stride commit_stride bonus_stride out_stride "
    "out_column_stride finished_stride batch rows"
)
_OUT_TYPES = {
    "accept_ptr": "*i32",
    "commit_ptr": "*i32",
    "finished_ptr": "*i32",
    "bonus_ptr": "*i64",
    "out_ptr": "*i64",
}
_ONES = ("accept_stride", "commit_stride", "bonus_stride", "out_column_stride", "finished_stride")


def _prefix_variant(name: str, rows: int, dtype: str, *, counted: bool) -> Variant:
    config = PrefixConfig(max(1, _LANES // power_of_two(rows)), power_of_two(rows))
    present = [n for n in _PREFIX.split() if n not in _ONES and (counted or n != "count_ptr")]
    return Variant(
        name=f"accept_prefix_kernel/{name}",
        kernel="dmtp_kernels.ops.accept.kernels:accept_prefix_kernel",
        signature={n: _OUT_TYPES.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in present},
        constants=({} if counted else {"count_ptr": None})
        | dict.fromkeys(_ONES, 1)
        | {"P": config.requests, "W": config.columns},
        num_warps=config.warps,
    )


_REQUEST = "temperature_ptr top_p_ptr budget_ptr count_ptr"
_DRAWN = "candidates_ptr candidates_stride"
_LOGITS = "logits_ptr logits_stride logits_row_stride"
_PROBS = "probs_ptr probs_stride probs_row_stride"
_DRAFT = f"{_PROBS} ids_ptr ids_stride ids_row_stride listed"
_CUTS = "cut_key_ptr cut_id_ptr"
_SIZE = "memory_ptr batch rows splits"
_SAMPLED = {
    "rows": f"{_LOGITS} {_REQUEST} {_PROBS} {_CUTS} {_SIZE} vocab",
    "surplus": f"{_DRAWN} {_LOGITS} {_REQUEST} {_DRAFT} {_CUTS} {_SIZE} vocab",
    "decide": f"{_DRAWN} {_LOGITS} {_REQUEST} seed_ptr position_ptr {_DRAFT} {_CUTS} {_SIZE} vocab",
    "race": f"{_DRAWN} {_LOGITS} {_REQUEST} seed_ptr position_ptr {_DRAFT} {_CUTS} {_SIZE} vocab",
    "finish": (
        f"{_DRAWN} {_REQUEST} stop_ptr stop_stride num_stop {_SIZE} accept_ptr commit_ptr bonus_ptr out_ptr "
        "finished_ptr status_ptr accept_stride commit_stride bonus_stride out_stride out_column_stride finished_stride "
        "status_stride"
    ),
}
_KINDS = {"temperature_ptr": "*fp32", "top_p_ptr": "*fp32", "cut_key_ptr": "*u64", "status_ptr": "*i32", **_OUT_TYPES}
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def _sampled_variant(step: str, name: str, dtype: str, absent: str, warps: int, **constants: Any) -> Variant:
    draft = {"onehot": "probs_ptr ids_ptr", "dense": "ids_ptr", "listed": ""}[name.split("_")[0]]
    if step == "rows" and name.startswith("listed"):
        draft = "probs_ptr"
    missing = [n for n in f"{draft} {absent}".split() if n in _SAMPLED[step].split()]
    ones = [n for n in (*_ONES, "status_stride") if n in _SAMPLED[step].split()]
    present = [n for n in _SAMPLED[step].split() if n not in missing and n not in ones]
    wide = {n: f"*{dtype}" for n in ("logits_ptr", "probs_ptr")}
    rows = step in ("rows", "surplus")
    dense = step == "rows" and "probs_ptr" in present
    return Variant(
        name=f"accept_{step}_kernel/{dtype}_{name}",
        kernel=f"dmtp_kernels.ops.accept.kernels_{'rows' if rows else 'finish'}:accept_{step}_kernel",
        signature={n: (_KINDS | wide).get(n, "*i64" if n.endswith("_ptr") else "i32") for n in present},
        constants=dict.fromkeys(missing) | dict.fromkeys(ones, 1) | constants,
        aligned=tuple(n for n in f"{_LOGITS} {_PROBS} vocab".split() if n in present),
        num_warps=warps,
        options=_unfused(),
        streams=("logits_ptr", *(("probs_ptr",) if dense else ())) if step == "rows" else (),
    )


def _sampled_variants(dtype: str, draft: str, cut: bool, *, block: bool) -> list[Variant]:
    kind = kind_of(_TORCH[dtype])
    splits, listed = power_of_two(-(-_VOCAB // _COLUMNS)), 512 if draft == "listed" else 1
    name = f"{draft}{'_cut' if cut else ''}{'_block' if block else ''}"
    absent = "count_ptr" if cut else f"count_ptr top_p_ptr {_CUTS}"
    both: dict[str, Any] = {"BLOCK": block, **kind, "W": splits, "L": listed}
    tile: dict[str, Any] = {**kind, "N": _COLUMNS}
    made = [
        _sampled_variant("decide", name, dtype, absent, _FINISH_WARPS[block], **both),
        _sampled_variant("race", name, dtype, absent, _WARPS, **both, N=_COLUMNS),
        _sampled_variant("finish", name, dtype, absent, _FINISH_WARPS[block], BLOCK=block, W=splits, C=8),
    ]
    if block:
        made.append(_sampled_variant("surplus", name, dtype, absent, _WARPS, **tile, L=listed))
    else:
        made.append(_sampled_variant("rows", name, dtype, absent, _WARPS, **tile))
    return made


_VOCAB = 248_320


def variants() -> tuple[Variant, ...]:
    """Every kernel at eight rows, or the one row of plain decoding, and a vocabulary of 248,320."""
    return (
        _prefix_variant("r8_i64", 8, "i64", counted=True),
        _prefix_variant("r8_i32", 8, "i32", counted=False),
        _prefix_variant("r1_i64", 1, "i64", counted=False),
        *_sampled_variants("fp32", "dense", False, block=False),
        *_sampled_variants("fp32", "dense", True, block=True),
        *_sampled_variants("bf16", "dense", True, block=False),
        *_sampled_variants("bf16", "dense", False, block=False),
        *_sampled_variants("bf16", "dense", False, block=True),
        *_sampled_variants("bf16", "onehot", False, block=False),
        *_sampled_variants("bf16", "listed", False, block=False),
        *_sampled_variants("bf16", "listed", True, block=True),
    )
