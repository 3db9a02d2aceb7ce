"""`Fusion`: how the MTP hidden state enters the drafter's block, and the folded table of its embedding half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dmtp_kernels.ops._checks import (
    FLOAT_DTYPES,
    check_choice,
    check_instance,
    check_range,
    check_real,
    check_same_device,
    check_tensor,
    check_whole,
)

MODES = ("residual", "residual_low_rank", "replace", "none")
SLOTS = ("t1", "masks")


class FusionArgs(NamedTuple):
    """A fusion as the op takes it: flat, in schema order."""

    weight: torch.Tensor | None  # [E, in]
    down: torch.Tensor | None  # [r, in]
    up: torch.Tensor | None  # [E, r]
    norm_e: torch.Tensor | None  # [E]
    norm_m: torch.Tensor | None  # [H]
    mode: str
    slots: str
    eps_e: float
    eps_m: float
    offset_e: float
    offset_m: float

    @property
    def first(self) -> torch.Tensor | None:
        """The matrix that reads the streams."""
        return self.weight if self.down is None else self.down


@dataclass(frozen=True, eq=False)
class Fusion:
    """What is added to, or replaces, an embedding of the block.

    With `e = E(T1)` and `h = h_mtp`, each stream gets one RMSNorm of its own,
    `RMS(x) = x / sqrt(mean(x^2) + eps) * (offset + norm)`; the embedding comes first in the concatenation:

    - `residual`: `e + weight @ [RMS_e(e); RMS_m(h)]`
    - `residual_low_rank`: `e + up @ down @ [RMS_e(e); RMS_m(h)]`
    - `replace`: `weight @ [RMS_e(e); RMS_m(h)]`
    - `none`: `e`

    The residual modes also take a matrix that reads the hidden state alone, `weight [E, H]` or `down [r, H]`: which one
    is meant follows from the shape. E, the embedding width, need not equal H.

    Attributes:
        mode: one of the above.
        weight: `[E, E + H]` or `[E, H]`.
        down, up: `[r, E + H]` or `[r, H]`, and `[E, r]`.
        norm_e, norm_m: `[E]` and `[H]` weights of the norms; no `norm_e` when the matrix reads the hidden alone.
        eps_e, eps_m: added to the mean square.
        offset_e, offset_m: 0 for plain RMSNorm, 1 for the Gemma form `1 + weight`.
        slots: `t1`: the fused vector sits at T1's slot. `masks`: T1 stays plain and the residual, which then reads the
            hidden state alone, is added to every MASK slot.

    Raises:
        ValueError, TypeError: the mode's tensors are missing, not its own, or do not fit together.
    """

    mode: str = "none"
    weight: torch.Tensor | None = None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    norm_e: torch.Tensor | None = None
    norm_m: torch.Tensor | None = None
    eps_e: float = 1e-6
    eps_m: float = 1e-6
    offset_e: float = 0.0
    offset_m: float = 0.0
    slots: str = "t1"

    def __post_init__(self) -> None:
        for name in ("eps_e", "eps_m", "offset_e", "offset_m"):
            check_real(name, getattr(self, name))
        check_fusion(self.args(), {})

    @classmethod
    def none(cls) -> Fusion:
        """The plain block."""
        return cls()

    @classmethod
    def residual(
        cls, weight: torch.Tensor, *, norm_m: torch.Tensor, norm_e: torch.Tensor | None = None, **options: Any
    ) -> Fusion:
        """`e + weight @ [...]`; `options` are eps, offsets and slots."""
        return cls(mode="residual", weight=weight, norm_e=norm_e, norm_m=norm_m, **options)

    @classmethod
    def residual_low_rank(
        cls,
        down: torch.Tensor,
        up: torch.Tensor,
        *,
        norm_m: torch.Tensor,
        norm_e: torch.Tensor | None = None,
        **options: Any,
    ) -> Fusion:
        """`e + up @ down @ [...]`; `options` are eps, offsets and slots."""
        return cls(mode="residual_low_rank", down=down, up=up, norm_e=norm_e, norm_m=norm_m, **options)

    @classmethod
    def replace(cls, weight: torch.Tensor, *, norm_e: torch.Tensor, norm_m: torch.Tensor, **options: Any) -> Fusion:
        """`weight @ [...]` instead of `e`; `options` are eps and offsets."""
        return cls(mode="replace", weight=weight, norm_e=norm_e, norm_m=norm_m, **options)

    def args(self) -> FusionArgs:
        """The fusion as the op takes it."""
        return FusionArgs(self.weight, self.down, self.up, self.norm_e, self.norm_m, **self.scalars())

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensor arguments of the op, in schema order."""
        return self.weight, self.down, self.up, self.norm_e, self.norm_m

    def scalars(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        return {
            "mode": self.mode,
            "slots": self.slots,
            "eps_e": self.eps_e,
            "eps_m": self.eps_m,
            "offset_e": self.offset_e,
            "offset_m": self.offset_m,
        }


def check_fusion(fusion: FusionArgs, symbols: dict[str, int], like: Mapping[str, str] | None = None) -> None:
    """Shapes, dtypes and devices of a fusion; binds E and H in `symbols` (E is the width of the embedding).

    `like` names the arguments that have bound them already.
    """
    check_choice("mode", fusion.mode, MODES)
    check_choice("slots", fusion.slots, SLOTS)
    for name, tensor in zip(("weight", "down", "up", "norm_e", "norm_m"), fusion[:5], strict=True):
        if tensor is not None:
            check_instance(name, tensor, torch.Tensor)
    check_range("eps_e", fusion.eps_e, 0.0)
    check_range("eps_m", fusion.eps_m, 0.0)
    low_rank = fusion.mode == "residual_low_rank"
    full = fusion.mode in ("residual", "replace")
    needed = {"weight": full, "down": low_rank, "up": low_rank, "norm_m": full or low_rank}
    for name, need in needed.items():
        if (getattr(fusion, name) is not None) != need:
            state = "missing" if need else "given"
            raise ValueError(f"{name}: is {state}, mode {fusion.mode!r} {'needs' if need else 'has no'} {name}")
    if fusion.mode == "none":
        if fusion.norm_e is not None:
            raise ValueError("norm_e: is given, mode 'none' has no norm_e")
        return
    first, norm_m = fusion.first, fusion.norm_m
    assert first is not None and norm_m is not None
    label = "down" if low_rank else "weight"
    if first.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{label}: dtype is {first.dtype}, must be dense floating point; dequantise it with its scales first"
        )
    check_tensor("norm_m", norm_m, ["H"], FLOAT_DTYPES, symbols, like=like)
    if fusion.up is not None:
        check_tensor("up", fusion.up, ["E", "r"], FLOAT_DTYPES, symbols, like=like)
        check_tensor("down", first, ["r", None], FLOAT_DTYPES, symbols)
    else:
        check_tensor("weight", first, ["E", None], FLOAT_DTYPES, symbols, like=like)
    width, both, alone = first.shape[1], symbols["E"] + symbols["H"], symbols["H"]
    may_read_alone = fusion.mode != "replace"
    if width != both and not (may_read_alone and width == alone):
        wanted = f"E + H = {both}" + (f" or H = {alone}" if may_read_alone else "")
        raise ValueError(f"{label}: dimension 1 is {width}, must be {wanted}")
    if fusion.slots == "masks" and (fusion.mode == "replace" or width != alone):
        raise ValueError(
            f"slots: is 'masks' with mode {fusion.mode!r} and {label} {tuple(first.shape)}, must be a residual whose "
            f"{label} reads the hidden state alone, [..., {alone}]"
        )
    if (width == both) != (fusion.norm_e is not None):
        state = "missing" if fusion.norm_e is None else "given"
        raise ValueError(
            f"norm_e: is {state}, {label} {tuple(first.shape)} reads {width} of H = {alone}, E + H = {both}"
        )
    if fusion.norm_e is not None:
        check_tensor("norm_e", fusion.norm_e, ["E"], FLOAT_DTYPES, symbols, like=like)
    check_same_device(
        "norm_m", norm_m.device, norm_e=fusion.norm_e, weight=fusion.weight, down=fusion.down, up=fusion.up
    )


def check_mask_id(mask_id: int, num_embeddings: int, eos_ids: tuple[int, ...] | list[int] = ()) -> int:
    """Check the mask token once, when the model is built.

    Args:
        mask_id: id that fills the MASK slots.
        num_embeddings: rows of the embedding table.
        eos_ids: ids with another meaning (end of sequence, padding) that a mask must not share.

    Returns:
        `mask_id`.

    Raises:
        ValueError, TypeError: `mask_id` is no int, is outside the table or is one of `eos_ids`.
    """
    check_whole("mask_id", mask_id)
    if not 0 <= mask_id < num_embeddings:
        raise ValueError(f"mask_id: is {mask_id}, must be in [0, {num_embeddings}), the rows of the embedding table")
    if mask_id in tuple(eos_ids):
        raise ValueError(
            f"mask_id: is {mask_id}, must not be one of the end-of-sequence or padding ids {list(eos_ids)}"
        )
    return mask_id
