"""The head's ops in eager PyTorch: the definition every kernel must match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dmtp_kernels.ops.lm_head.canonical import canonical_chunks, canonical_dot
from dmtp_kernels.ops.lm_head.digits import fixed_point
from dmtp_kernels.ops.lm_head.formats import FORMATS, dequantize, row_chunks, whole_rows
from dmtp_kernels.ops.lm_head.head import HeadArgs
from dmtp_kernels.ops.lm_head.keys import NO_KEY, encode_key

NO_TOKEN, UNCERTIFIED = 1, 2

_HEAD = len(HeadArgs._fields)
_SCORE_ELEMENTS = 1 << 24
_GATHER_ELEMENTS = 1 << 22
_DIRECT_ELEMENTS = 1 << 18
_TINY = 2.0**-125
_HUGE = 2.0**100
SHORTLIST_GROUP = 4


def lm_head_select(hidden: torch.Tensor, *rest: Any) -> None:
    """`rest`: the head, k, logit_dtype, then outputs key `[n, k]` and status `[n]`."""
    head = HeadArgs(*rest[:_HEAD])
    k, logit_dtype, key, status = rest[_HEAD:]
    unproved = 0 if head.certified or head.full_scan else UNCERTIFIED
    step = max(1, _SCORE_ELEMENTS // max(1, head.num_valid))
    for start in range(0, hidden.shape[0], step):
        part = slice(start, start + step)
        key[part] = _select(hidden[part], head, k, logit_dtype)
    status.copy_(torch.where(key[:, 0] == NO_KEY, NO_TOKEN, 0) | unproved)


def lm_head_screen(hidden: torch.Tensor, *rest: Any) -> None:
    """`rest`: the head, k, then outputs ids `[n, K]`, count `[n]` and lower_bound `[n]`."""
    head = HeadArgs(*rest[:_HEAD])
    k, ids, count, lower_bound = rest[_HEAD:]
    ids.fill_(-1)
    width = min(head.capacity, head.num_valid)
    if width == 0:
        count.zero_()
        lower_bound.fill_(-torch.inf)
        return
    step = max(1, _SCORE_ELEMENTS // head.num_valid)
    for start in range(0, hidden.shape[0], step):
        part = slice(start, start + step)
        keep, lower_bound[part] = _survivors(hidden[part], head, k, "float32")
        local, count[part] = _compact(keep, width)
        ids[part, :width] = torch.where(local >= 0, local + head.id_offset, -1)


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
    local = ids.to(torch.int64) - id_offset
    listed = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
    mine = listed & (ids >= 0) & (local >= 0) & (local < num_valid)
    key.copy_(_rescore(hidden, weight, local, torch.where(mine, ids.to(torch.int64), -1), k, logit_dtype))


def _select(hidden: torch.Tensor, head: HeadArgs, k: int, logit_dtype: str) -> torch.Tensor:
    width = min(head.capacity, head.num_valid)
    # below this size the dots of all rows cost less than a screen
    direct = hidden.shape[0] * head.num_valid * hidden.shape[1] <= _DIRECT_ELEMENTS
    if width == head.num_valid or (head.full_scan and (direct or not head.certified)):
        return _scan(hidden, head, k, logit_dtype)
    keep, _ = _survivors(hidden, head, k, logit_dtype)
    if not head.certified:
        # ties at its end can make a shortlist longer than the capacity
        width = head.num_valid
    local, count = _compact(keep, width)
    local = local[:, : _longest(count, width)]
    best = _rescore(hidden, head.weight, local, _token_ids(head, local), k, logit_dtype)
    if not head.certified:
        return best
    rows = _rows_where(count > width)
    if rows.shape[0]:
        full = _scan(hidden[rows], head, k, logit_dtype)
        best[rows] = torch.where((count > width)[rows, None], full, best[rows])
    return best


def _longest(count: torch.Tensor, width: int) -> int:
    # a CPU tensor can be looked at without waiting for a device: leave out columns that are -1 in every row
    return min(width, int(count.numpy().max(initial=1))) if count.device.type == "cpu" else width


def _rows_where(flag: torch.Tensor) -> torch.Tensor:
    # rows the scan would not change are skipped in the same way
    if flag.device.type == "cpu":
        return torch.from_numpy(flag.numpy().nonzero()[0])
    return torch.arange(flag.shape[0], device=flag.device)


def _survivors(hidden: torch.Tensor, head: HeadArgs, k: int, logit_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that can still be among the k best `[n, V]`, and the proved lower bound of the k-th best logit `[n]`."""
    scores = _scores(hidden, head)
    named = _token_ids(head, torch.arange(scores.shape[1], device=scores.device)) >= 0
    if not head.certified:
        return _shortlist(scores, named, max(head.capacity // SHORTLIST_GROUP, k)), scores.new_full(
            (scores.shape[0],), -torch.inf
        )
    radius = _radius(hidden, head)
    # bound >= 2^-18 ||w_v||, so below this radius no order of summation can overflow fp32
    radius = torch.where(radius < _HUGE, radius, torch.inf)
    lower, upper = scores - radius, scores + radius
    lower = torch.where((lower < torch.inf) & named, lower, -torch.inf)
    # fewer than k rows: width == num_valid, nothing to leave out
    best = lower.amax(dim=1, keepdim=True) if k == 1 else lower.topk(min(k, lower.shape[1]), dim=1).values[:, -1:]
    best = best - _TINY  # what products lost to underflow
    # rounding is monotone, so the comparison may be made after it
    keep = ~(_rounded(upper, logit_dtype) < _rounded(best, logit_dtype))
    return keep & named, best[:, 0]


def _radius(hidden: torch.Tensor, head: HeadArgs) -> torch.Tensor:
    assert head.bound is not None
    bound = head.bound[: head.num_valid]
    if head.down is None:
        return bound * _length(hidden.to(torch.float64))
    _, rest = _deflated(hidden, head.down)
    return bound[:, 0] * _length(rest) + bound[:, 1] * _length(hidden.to(torch.float64))


def _length(rows: torch.Tensor) -> torch.Tensor:
    # up also where fp32 has few bits left; [n, 1]
    return rows.norm(dim=1, keepdim=True).to(torch.float32) * (1 + 2.0**-20) + 2.0**-149


def _shortlist(scores: torch.Tensor, named: torch.Tensor, groups: int) -> torch.Tensor:
    """Rows of the groups of four consecutive rows whose greatest score is among the `groups` greatest `[n, V]`."""
    ranked = torch.where(named & ~scores.isnan(), scores, -torch.inf)
    ranked = torch.nn.functional.pad(ranked, (0, -ranked.shape[1] % SHORTLIST_GROUP), value=-torch.inf)
    best = ranked.unflatten(1, (-1, SHORTLIST_GROUP)).amax(dim=2)
    if groups < best.shape[1]:
        inside = best >= best.topk(groups, dim=1).values[:, -1:]
    else:
        inside = torch.ones_like(best, dtype=torch.bool)
    return inside.repeat_interleave(SHORTLIST_GROUP, dim=1)[:, : scores.shape[1]] & named


def _compact(keep: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `width` kept columns in ascending order, -1 after them `[n, width]`, and how many were kept `[n]`."""
    rows, columns = keep.shape
    place = keep.cumsum(dim=1)
    slot = torch.where(keep & (place <= width), place - 1, width)
    column = torch.arange(columns, device=keep.device).expand(rows, columns)
    local = torch.full((rows, width + 1), -1, device=keep.device).scatter_(1, slot, column)
    return local[:, :width], place[:, -1]


def _rescore(
    hidden: torch.Tensor, weight: torch.Tensor, local: torch.Tensor, token: torch.Tensor, k: int, logit_dtype: str
) -> torch.Tensor:
    """The k best keys of the listed rows; an entry with a negative token is skipped."""
    rows, width = local.shape
    if weight.shape[0] == 0 or rows * width == 0:
        return local.new_full((rows, k), NO_KEY)
    row = local.clamp(0, weight.shape[0] - 1)
    step = max(1, _GATHER_ELEMENTS // (width * max(1, weight.shape[1])))
    parts = [canonical_dot(hidden[i : i + step], _gather(weight, row[i : i + step])) for i in range(0, rows, step)]
    return _best(encode_key(_rounded(torch.cat(parts), logit_dtype), token), k)


def _gather(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, row.flatten()).unflatten(0, row.shape)  # [n, K, H]


def _scan(hidden: torch.Tensor, head: HeadArgs, k: int, logit_dtype: str) -> torch.Tensor:
    """The k best keys over all rows."""
    best = torch.full((hidden.shape[0], k), NO_KEY, device=hidden.device)
    for start, logits in canonical_chunks(hidden, head.weight[: head.num_valid]):
        token = _token_ids(head, torch.arange(start, start + logits.shape[1], device=hidden.device))
        best = _best(torch.cat((best, encode_key(_rounded(logits, logit_dtype), token.expand_as(logits))), dim=1), k)
    return best


def _best(keys: torch.Tensor, k: int) -> torch.Tensor:
    if k == 1:
        return keys.amax(dim=1, keepdim=True)
    if keys.shape[1] < k:
        keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=NO_KEY)
    return keys.topk(k, dim=1).values


def _token_ids(head: HeadArgs, local: torch.Tensor) -> torch.Tensor:
    token = local + head.id_offset
    if head.id_map is not None:
        mapped = head.id_map[local.clamp(min=0)].to(torch.int64)
        token = token + mapped if head.id_map_mode == "offset" else mapped
    return torch.where(local >= 0, token, -1)


def _rounded(logits: torch.Tensor, logit_dtype: str) -> torch.Tensor:
    return logits.to(torch.bfloat16).to(torch.float32) if logit_dtype == "bfloat16" else logits


def _scores(hidden: torch.Tensor, head: HeadArgs) -> torch.Tensor:
    """Screen scores of the real rows `[n, V]`: exact integer products where rows have one scale, else float64 ones.

    Not fp32 matmuls: a global setting may lower their precision, which would break the bound.
    """
    if head.format == "low_rank":
        assert head.down is not None and head.up is not None
        state, up = canonical_dot(hidden, head.down), head.up[: head.num_valid]
        if head.scale is None:
            return canonical_dot(state, up).to(torch.float32)
        return _integer_scores(state, [up], head.scale[: head.num_valid])
    width = hidden.shape[1]
    chunks = row_chunks(head.num_valid, width)
    if head.scale is not None and head.scale.dim() == 1:
        assert head.codes is not None
        codes = head.codes
        return _integer_scores(
            hidden, (whole_rows(codes[a:b], head.format, width) for a, b in chunks), head.scale[: head.num_valid]
        )
    left, extra = hidden.to(torch.float64), None
    if head.down is not None and head.up is not None:
        extra, left = _deflated(hidden, head.down)
    parts = []
    for start, stop in chunks:
        part = left @ _screen_rows(head, start, stop).to(torch.float64).T
        if extra is not None and head.up is not None:
            part += extra @ head.up[start:stop].to(torch.float64).T
        parts.append(part.to(torch.float32))
    return torch.cat(parts, dim=1)


def _integer_scores(hidden: torch.Tensor, rows: Iterable[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    q, step = fixed_point(hidden)
    total = torch.cat([q @ part.to(torch.float64).T for part in rows], dim=1)  # whole numbers below 2^53
    return (total * step * scale.to(torch.float64)).to(torch.float32)


def _deflated(hidden: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`z = down h` and what `down^T z` leaves of h, float64."""
    state, directions = hidden.to(torch.float64), down.to(torch.float64)
    inside = state @ directions.T
    return inside, state - inside @ directions


def _screen_rows(head: HeadArgs, start: int, stop: int) -> torch.Tensor:
    if not FORMATS[head.format].bits:
        return head.weight[start:stop]
    assert head.codes is not None and head.scale is not None
    return dequantize(head.codes[start:stop], head.scale[start:stop], head.format, head.weight.shape[1])
