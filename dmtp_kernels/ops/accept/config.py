"""Launch knobs of the acceptance rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._variant import Variant


def power_of_two(n: int) -> int:
    """The least power of two that is `n` or more."""
    return 1 << max(0, n - 1).bit_length()


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


def variants() -> tuple[Variant, ...]:
    """Every kernel at the shapes of the round: eight rows, and the one row of plain decoding."""
    return (
        _prefix_variant("r8_i64", 8, "i64", counted=True),
        _prefix_variant("r8_i32", 8, "i32", counted=False),
        _prefix_variant("r1_i64", 1, "i64", counted=False),
    )
