"""Launches of the head's Triton kernels up to the value that a group of rows must reach."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._workspace import workspace
from dmtp_kernels.ops.lm_head import config, kernels, kernels_finish, kernels_screen
from dmtp_kernels.ops.lm_head.head import HeadArgs
from dmtp_kernels.ops.lm_head.reference import UNCERTIFIED

MAPS = {"none": 0, "offset": 1, "absolute": 2}
_ALIGN = 256


class Groups(NamedTuple):
    """Values of groups of consecutive rows, and the values whose rank-th greatest a group must reach."""

    total: int
    size: int  # rows of one
    stride: int = 0
    upper: torch.Tensor | None = None  # [n, stride] int32, None: every row is scored
    pool: torch.Tensor | None = None  # [n, pool_stride] int32, of which `held` are used
    pool_stride: int = 0
    held: int = 1
    rank: int = 1
    block: int = 1  # held, rounded up to a power of two; 1: `pool` [n] is what a group must reach


class _Sizes(NamedTuple):
    states: int
    columns: int  # of what the codes are multiplied with: H, or the rank of the factors
    padded: int
    per_sum: int
    factor: int  # 0: no correction sums

    @staticmethod
    def of(hidden: torch.Tensor, head: HeadArgs) -> _Sizes:
        columns = hidden.shape[1] if head.up is None else head.up.shape[1]
        padded = -(-columns // config.PADDING) * config.PADDING
        return _Sizes(hidden.shape[0], columns, padded, *config.OFFSETS.get(head.format, (padded, 0)))


def rank_of(head: HeadArgs, k: int) -> int:
    """How many groups reach the threshold at least."""
    return k if head.certified else max(head.capacity // config.SHORTLIST_GROUP, k)


def screen(
    hidden: torch.Tensor, head: HeadArgs, k: int, group: int, key: torch.Tensor | None, status: torch.Tensor | None
) -> Groups:
    """Screen all rows; `group` is the rows per value of a certified format. Presets key and status where given."""
    sizes = _Sizes.of(hidden, head)
    n, columns, padded, per_sum, factor = sizes
    device = hidden.device
    group = group if head.certified else config.SHORTLIST_GROUP
    count = -(-head.num_valid // group)
    groups = Groups(count, group, -(-count // 16) * 16)
    integer = head.format != "dense" and (head.up is None or head.up.dtype == torch.int8)
    single = head.certified and k == 1
    scratch = carve(
        "lm_head_screen",
        device,
        state=(0 if head.down is None else 4 * n * columns, torch.float32),
        digits=(3 * n * padded if integer else 0, torch.int8),
        sums=(12 * n * (padded // per_sum) if factor else 0, torch.int32),
        step=(4 * n if integer else 0, torch.float32),
        length=(4 * n if head.certified else 0, torch.float32),
        best=(4 * n if single else 0, torch.int32),
        upper=(4 * n * groups.stride, torch.int32),
        lower=(4 * n * groups.stride if head.certified and not single else 0, torch.int32),
    )
    source = hidden
    if head.down is not None:
        source = scratch["state"].view(n, columns)
        shape = config.finish_config(n, columns, 1, processors(device))
        kernels.lm_head_project_kernel[(n, -(-columns // shape.rows))](
            hidden, head.down, source, columns, hidden.shape[1], hidden.stride(0), head.down.stride(0),
            R=shape.rows, **options(shape),
        )  # fmt: skip
    if integer or head.certified or key is not None:
        prepare(source, head, scratch, key, status)
    if head.up is not None and not integer:
        tile = config.factor_config(processors(device))
        kernels.lm_head_factor_kernel[(-(-head.num_valid // tile.block_v),)](
            head.up, head.id_map, source, scratch["upper"], n, head.num_valid, head.id_offset,
            columns, count, groups.stride, head.up.stride(0),
            MAP=MAPS[head.id_map_mode], GROUP=group, BLOCK_V=tile.block_v, **options(tile),
        )  # fmt: skip
    else:
        _score(hidden, head, scratch, sizes, groups)
    groups = groups._replace(upper=scratch["upper"])
    if single:
        return groups._replace(pool=scratch["best"])
    return _pooled(groups, scratch["lower"] if head.certified else scratch["upper"], n, rank_of(head, k))


def prepare(
    source: torch.Tensor,
    head: HeadArgs,
    scratch: dict[str, Any],
    key: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    """Digits, norms and first values of each state."""
    sizes = _Sizes.of(source, head._replace(up=None))
    block, warps = config.prepare_block(sizes.padded)
    digits = scratch.get("digits")
    kernels.lm_head_prepare_kernel[(sizes.states,)](
        source, digits, scratch.get("sums"), scratch.get("step"), scratch.get("length"), scratch.get("best"),
        key, status, sizes.columns, sizes.padded, source.stride(0),
        0 if key is None else key.stride(0), 0 if status is None else status.stride(0), unproved(head),
        BLOCK=block, DIGITS=digits is not None, SUMS=sizes.per_sum if sizes.factor else block, FACTOR=sizes.factor,
        num_warps=warps, **config.compiler_options(),
    )  # fmt: skip


def _score(hidden: torch.Tensor, head: HeadArgs, scratch: dict[str, Any], sizes: _Sizes, groups: Groups) -> None:
    n, columns, padded, per_sum, factor = sizes
    dense = head.format == "dense"
    name = "int8" if head.format == "low_rank" else head.format
    rows = head.weight if dense else head.codes if head.up is None else head.up
    assert rows is not None
    states = hidden if dense else scratch["digits"]
    element = rows.element_size() if rows.dtype == states.dtype else 4
    shape = config.screen_config(name, n, head.num_valid, columns, element, processors(hidden.device))
    kernels_screen.lm_head_screen_kernel[(-(-n // shape.block_n), -(-head.num_valid // shape.block_v))](
        rows, head.scale, head.bound, head.id_map, states, scratch["sums"], scratch["step"], scratch["length"],
        scratch["best"], scratch["upper"], scratch["lower"],
        n, head.num_valid, head.id_offset, columns, padded, groups.total, groups.stride,
        rows.stride(0), 0 if head.scale is None else head.scale.stride(0),
        hidden.stride(0) if dense else 3 * padded, 3 * (padded // per_sum) if factor else 0,
        FORMAT=name, CERTIFIED=head.certified, MAP=MAPS[head.id_map_mode], GROUP=groups.size,
        BLOCK_V=shape.block_v, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        **options(shape),
    )  # fmt: skip


def _pooled(groups: Groups, values: torch.Tensor, n: int, rank: int) -> Groups:
    """Few values that have the same rank-th greatest as all."""
    pool = config.pool_config(groups.total, rank)
    if pool.splits == 0:
        return groups._replace(pool=values, pool_stride=groups.stride, held=groups.total, rank=rank, block=pool.pool)
    held = pool.splits * rank
    reduced = carve("lm_head_pool", values.device, pool=(4 * n * held, torch.int32))["pool"]
    kernels_finish.lm_head_pool_kernel[(n, pool.splits)](
        values, reduced, pool.share, groups.total, groups.stride, rank,
        BLOCK=pool.block, num_warps=pool.warps, **config.compiler_options(),
    )  # fmt: skip
    return groups._replace(pool=reduced, pool_stride=held, held=held, rank=rank, block=pool.pool)


def unproved(head: HeadArgs) -> int:
    """Status of an answer before it is known whether there is a token."""
    return 0 if head.certified or head.full_scan else UNCERTIFIED


def carve(name: str, device: torch.device, **parts: tuple[int, torch.dtype]) -> dict[str, Any]:
    """Named pieces `(bytes, dtype)` of one scratch buffer, aligned; None for empty ones."""
    starts, total = {}, 0
    for part, (size, _) in parts.items():
        starts[part] = total
        total += -(-size // _ALIGN) * _ALIGN
    buffer = workspace(name, device, total)
    return {
        part: buffer[starts[part] : starts[part] + size].view(dtype) if size else None
        for part, (size, dtype) in parts.items()
    }


def options(shape: config.ScreenConfig | config.FinishConfig) -> dict[str, Any]:
    """Launch options of a tile shape."""
    compiler = config.compiler_options(shape.registers)
    return {"STAGES": shape.stages, "num_warps": shape.warps, "num_stages": shape.stages, **compiler}
