"""The head's ops on Triton; `kernels.md` counts the launches of each route."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops.lm_head import config, kernels_finish, reference
from dmtp_kernels.ops.lm_head.head import HeadArgs
from dmtp_kernels.ops.lm_head.keys import NO_KEY
from dmtp_kernels.ops.lm_head.launch_screen import (
    MAPS,
    Groups,
    carve,
    options,
    prepare,
    rank_of,
    screen,
    unproved,
)

_HEAD = len(HeadArgs._fields)
_MAX_COLUMNS = 16384  # more could overflow the int32 sums
_MAX_TOP = 256


def lm_head_select(hidden: torch.Tensor, *rest: Any) -> None:
    """`rest`: the head, k, logit_dtype, then outputs key `[n, k]` and status `[n]`."""
    head = HeadArgs(*rest[:_HEAD])
    k, logit_dtype, key, status = rest[_HEAD:]
    if not in_kernels(hidden, head, k):
        reference.lm_head_select(hidden, *rest)
        return
    if head.num_valid == 0:
        key.fill_(NO_KEY)
        status.fill_(unproved(head) | reference.NO_TOKEN)
        return
    with _on(hidden.device):
        for part in _parts(hidden, config.MAX_STATES):
            _select(hidden[part], head, k, logit_dtype == "bfloat16", key[part], status[part])


def lm_head_screen(hidden: torch.Tensor, *rest: Any) -> None:
    """`rest`: the head, k, then outputs ids `[n, K]`, count `[n]` and lower_bound `[n]`."""
    head = HeadArgs(*rest[:_HEAD])
    k, ids, count, lower_bound = rest[_HEAD:]
    if not in_kernels(hidden, head, k):
        reference.lm_head_screen(hidden, *rest)
        return
    if head.num_valid == 0:
        ids.fill_(-1)
        count.zero_()
        lower_bound.fill_(-torch.inf)
        return
    with _on(hidden.device):
        for part in _parts(hidden, config.MAX_LISTED_STATES):
            _list(hidden[part], head, k, ids[part], count[part], lower_bound[part])


def lm_head_rescore(
    hidden: torch.Tensor,  # [n, H]
    weight: torch.Tensor,  # [V, H]
    ids: torch.Tensor,  # [n, K]
    count: torch.Tensor,  # [n]
    k: int,
    id_offset: int,
    num_valid: int,
    logit_dtype: str,
    key: torch.Tensor,  # [n, k] out
) -> None:
    n, width = ids.shape
    if torch.float64 in (hidden.dtype, weight.dtype) or hidden.shape[1] == 0 or k > _MAX_TOP:
        reference.lm_head_rescore(hidden, weight, ids, count, k, id_offset, num_valid, logit_dtype, key)
        return
    if n == 0:
        return
    shape = config.finish_config(n, width, 1, processors(hidden.device))
    share = max(1, -(-width // shape.splits))
    splits = max(1, -(-width // share))
    top = _power(k)
    lists = _lists(n, splits, top, hidden.device)
    with _on(hidden.device):
        kernels_finish.lm_head_rescore_kernel[(n, splits)](
            hidden, weight, ids, count, lists, num_valid, id_offset, share, width, hidden.shape[1],
            hidden.stride(0), weight.stride(0), ids.stride(0), count.stride(0),
            BF16=logit_dtype == "bfloat16", R=shape.rows, TOP=top, **options(shape),
        )  # fmt: skip
        _merge(lists, splits * top, 0, key, None)


def in_kernels(hidden: torch.Tensor, head: HeadArgs, k: int) -> bool:
    """Whether the kernels take this head.

    float64, deflated heads, empty or very wide rows, and k or a capacity in the thousands go to the reference.
    """
    read = (hidden, head.weight, head.down, head.up)
    widths = [hidden.shape[1]] + ([] if head.up is None else [head.up.shape[1]])
    group = 1 if head.certified else config.SHORTLIST_GROUP
    pool = config.pool_config(-(-head.num_valid // group), rank_of(head, k))
    return (
        head.format != "deflated"
        and all(t is None or t.dtype != torch.float64 for t in read)
        and min(widths) > 0
        and max(widths) <= _MAX_COLUMNS
        and k <= _MAX_TOP
        and pool.pool <= config.MAX_POOL
    )


def _select(hidden: torch.Tensor, head: HeadArgs, k: int, bf16: bool, key: torch.Tensor, status: torch.Tensor) -> None:
    n, size = hidden.shape
    preset = (key, status) if k == 1 else (None, None)
    if not head.certified and (head.full_scan or head.capacity >= head.num_valid):
        groups = Groups(-(-head.num_valid // config.CERTIFIED_GROUP), config.CERTIFIED_GROUP)
        if k == 1:
            prepare(hidden, head, {}, *preset)
    else:
        groups = screen(hidden, head, k, config.CERTIFIED_GROUP, *preset)
    shape = config.finish_config(n, groups.total, groups.size, processors(hidden.device), groups.upper is None)
    top = _power(k)
    lists = None if k == 1 else _lists(n, shape.splits, top, hidden.device)
    kernels_finish.lm_head_finish_kernel[(n, shape.splits)](
        hidden, head.weight, head.id_map, groups.upper, groups.pool, *preset, lists,
        head.num_valid, head.id_offset, -(-groups.total // shape.splits), groups.held, groups.rank,
        groups.total, groups.stride, size, groups.pool_stride,
        hidden.stride(0), head.weight.stride(0), key.stride(0), status.stride(0),
        CERTIFIED=head.certified, BF16=bf16, MAP=MAPS[head.id_map_mode], GROUP=groups.size, R=shape.rows,
        BLOCK=shape.block, TOP=top, POOL=groups.block, **options(shape),
    )  # fmt: skip
    if lists is not None:
        _merge(lists, shape.splits * top, unproved(head), key, status)


def _list(
    hidden: torch.Tensor, head: HeadArgs, k: int, ids: torch.Tensor, count: torch.Tensor, lower_bound: torch.Tensor
) -> None:
    # one value per row, so that certified formats list survivors only
    groups = screen(hidden, head, k, 1, None, None)
    block, warps = config.list_block(head.num_valid, processors(hidden.device))
    kernels_finish.lm_head_list_kernel[(hidden.shape[0],)](
        groups.upper, groups.pool, head.id_map, ids, count, lower_bound,
        head.num_valid, head.id_offset, ids.shape[1], groups.held, groups.rank, groups.total, groups.stride,
        groups.pool_stride, ids.stride(0), count.stride(0), lower_bound.stride(0),
        CERTIFIED=head.certified, MAP=MAPS[head.id_map_mode], GROUP=groups.size, BLOCK=max(block, groups.size),
        POOL=groups.block, num_warps=warps, **config.compiler_options(),
    )  # fmt: skip


def _lists(n: int, splits: int, top: int, device: torch.device) -> torch.Tensor:
    lists: torch.Tensor = carve("lm_head_lists", device, lists=(8 * n * splits * top, torch.int64))["lists"]
    return lists


def _merge(lists: torch.Tensor, count: int, flags: int, key: torch.Tensor, status: torch.Tensor | None) -> None:
    block = _power(count)
    kernels_finish.lm_head_merge_kernel[(key.shape[0],)](
        lists, key, status, count, key.shape[1], flags,
        key.stride(0), key.stride(1), 0 if status is None else status.stride(0),
        BLOCK=block, num_warps=config.merge_warps(block), **config.compiler_options(),
    )  # fmt: skip


def _parts(hidden: torch.Tensor, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, hidden.shape[0], most))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the current device: make it the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
