"""`LMHead`: the rows of a head, its screen, and how its rows are numbered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dmtp_kernels.ops._checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_choice,
    check_instance,
    check_range,
    check_same_device,
    check_tensor,
    check_whole,
)
from dmtp_kernels.ops.lm_head.formats import FORMATS, codes_shape, scale_shape

ID_MAP_MODES = ("none", "offset", "absolute")
UP_DTYPES = (*FLOAT_DTYPES, torch.int8)

HEAD_TENSORS = "Tensor? codes, Tensor? scale, Tensor? bound, Tensor? down, Tensor? up, Tensor? id_map"
HEAD_SCALARS = "str format, int num_valid, int id_offset, str id_map_mode, int capacity, bool full_scan"


class HeadArgs(NamedTuple):
    """A head as the ops take it: flat, in schema order."""

    weight: torch.Tensor  # [V, H]
    codes: torch.Tensor | None  # int8 [V, H] or packed uint8 [V, bytes]
    scale: torch.Tensor | None  # fp32 [V] or [V, groups]
    bound: torch.Tensor | None  # fp32 [V], deflated: [V, 2]
    down: torch.Tensor | None  # [r, H]
    up: torch.Tensor | None  # [V, r]
    id_map: torch.Tensor | None  # [V]
    format: str
    num_valid: int
    id_offset: int
    id_map_mode: str
    capacity: int
    full_scan: bool

    @property
    def certified(self) -> bool:
        """Whether the screen proves its answer."""
        return FORMATS[self.format].certified


@dataclass(frozen=True, eq=False)
class LMHead:
    """The rows of one rank's head with a cheap screening copy, made by `pack_lm_head`.

    Attributes:
        weight: `[V, H]` full-precision rows, borrowed. The answer is always decided by their canonical dots.
        format: screen format; decides which of the next five tensors exist.
        num_valid: rows 0..num_valid-1 are real, the rest is padding and never wins.
        codes, scale: quantised formats: int8 `[V, H]` (6 and 4 bits: packed uint8) and fp32 `[V]` or `[V, groups]`.
        bound: certified formats: fp32 `[V]`, see `bounds.row_bounds`; deflated: `[V, 2]`, see `bounds.deflated_bounds`.
        down, up: low_rank: `[r, H]` and `[V, r]`, the screen score is `up @ (down @ h)`; an int8 `up` has one scale per
            row. deflated: the strongest directions of the hidden states and each row's product with them.
        id_offset: head id of row 0 (first row of a vocabulary shard).
        id_map, id_map_mode: head id to token id. `none`: token = row + id_offset; `offset`: token = row + id_offset +
            id_map[row]; `absolute`: token = id_map[row]. A row whose token is negative never wins.
        capacity: most rows a screen hands to the exact rescore.
        full_scan: decide rows that the screen cannot prove by the dots of all rows. Certified formats always do.

    Raises:
        ValueError, TypeError: a tensor that the format needs is missing, is not its own, or has a wrong shape or dtype.
    """

    weight: torch.Tensor
    format: str
    num_valid: int
    capacity: int
    codes: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    bound: torch.Tensor | None = None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    id_map: torch.Tensor | None = None
    id_offset: int = 0
    id_map_mode: str = "none"
    full_scan: bool = True

    def __post_init__(self) -> None:
        for name in ("codes", "scale", "bound", "down", "up", "id_map"):
            if (tensor := getattr(self, name)) is not None:
                check_instance(name, tensor, torch.Tensor)
        for name in ("num_valid", "id_offset", "capacity"):
            check_whole(name, getattr(self, name))
        check_instance("full_scan", self.full_scan, bool)
        check_head(self.args(), {})

    @property
    def certified(self) -> bool:
        """Whether the screen proves its answer."""
        return FORMATS[self.format].certified

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.weight.shape[1]

    def args(self) -> HeadArgs:
        """The head as the ops take it."""
        return HeadArgs(*self.tensors(), **self.scalars())

    def tensors(self) -> tuple[Any, ...]:
        """The tensor arguments of the ops, in schema order."""
        return self.weight, self.codes, self.scale, self.bound, self.down, self.up, self.id_map

    def scalars(self) -> dict[str, Any]:
        """The keyword arguments of the ops."""
        return {
            "format": self.format,
            "num_valid": self.num_valid,
            "id_offset": self.id_offset,
            "id_map_mode": self.id_map_mode,
            "capacity": self.capacity,
            "full_scan": self.full_scan,
        }


def check_weight(weight: torch.Tensor) -> None:
    """A head's rows must be dense floating point; packed or scaled layouts are refused by name."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight: is {type(weight).__name__}, must be a [V, H] tensor")
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"weight: dtype is {weight.dtype}, must be a dense {', '.join(str(d) for d in FLOAT_DTYPES)}; a quantised "
            "layout must be dequantised with its scales first (weight_scale of pack_lm_head takes one scale per row)"
        )


def check_head(head: HeadArgs, symbols: dict[str, int]) -> None:
    """Shapes, dtypes and devices of a head; binds V and H in `symbols`."""
    check_choice("format", head.format, tuple(FORMATS))
    check_weight(head.weight)
    check_tensor("weight", head.weight, ["V", "H"], FLOAT_DTYPES, symbols)
    rows, hidden = head.weight.shape
    fmt = FORMATS[head.format]
    needed = {
        "codes": fmt.bits > 0,
        "scale": fmt.bits > 0 or (fmt.factors and head.up is not None and head.up.dtype == torch.int8),
        "bound": fmt.certified,
        "down": fmt.factors,
        "up": fmt.factors,
        "id_map": head.id_map_mode != "none",
    }
    check_choice("id_map_mode", head.id_map_mode, ID_MAP_MODES)
    for name, need in needed.items():
        given = getattr(head, name) is not None
        if given != need:
            owner = f"id_map_mode {head.id_map_mode!r}" if name == "id_map" else f"format {head.format!r}"
            raise ValueError(
                f"{name}: is {'given' if given else 'missing'}, {owner} {'needs' if need else 'has no'} {name}"
            )
    if head.codes is not None and head.scale is not None:
        dtype = torch.int8 if fmt.bits == 8 else torch.uint8
        check_tensor("codes", head.codes, codes_shape(head.format, rows, hidden), (dtype,), symbols)
        check_tensor("scale", head.scale, scale_shape(head.format, rows, hidden), (torch.float32,), symbols)
    elif head.scale is not None:
        check_tensor("scale", head.scale, ["V"], (torch.float32,), symbols)
    if head.bound is not None:
        check_tensor("bound", head.bound, ["V", 2] if fmt.factors else ["V"], (torch.float32,), symbols)
    if head.down is not None and head.up is not None:
        check_tensor("down", head.down, ["r", "H"], FLOAT_DTYPES, symbols)
        check_tensor("up", head.up, ["V", "r"], FLOAT_DTYPES if fmt.bits else UP_DTYPES, symbols)
    if head.id_map is not None:
        check_tensor("id_map", head.id_map, ["V"], INDEX_DTYPES, symbols)
    check_same_device("weight", head.weight.device, **{n: getattr(head, n) for n in needed})
    check_range("num_valid", head.num_valid, 0, rows)
    check_range("id_offset", head.id_offset, 0, 2**31 - 1 - rows)
    check_range("capacity", head.capacity, 1)
    if fmt.certified and not head.full_scan:
        raise ValueError(f"full_scan: is False, must be True for the certified format {head.format!r}")
