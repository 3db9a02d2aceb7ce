"""Block attention on an installed FlashAttention, where its masks express the case exactly. Never chosen by itself."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from dmtp_kernels.backends import BackendUnavailable
from dmtp_kernels.ops.block_attention.flash_masks import NO_BOUND, Case, Library, Part, plan, refusal

_PACKAGES = {3: "flash-attn-3", 4: "flash-attn-4", 2: "flash-attn"}  # in order of preference
_OLDEST_2 = (2, 6)  # the first with soft caps
_SYNCS_2 = (2, 8, 4)  # the first that reads the lengths of paged calls on the host

# q, keys, values, part, lengths, table, skip, scale, soft cap -> out [B, n, Hq, D], lse [B, Hq, n]
Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def installed() -> tuple[tuple[int, str], ...]:
    """Generation and version of every FlashAttention here that this module can call; none of them is imported."""
    found = []
    for generation, package in _PACKAGES.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            # a build of 3 may be a bare module
            if generation != 3 or importlib.util.find_spec("flash_attn_interface") is None:
                continue
            version = "unknown version"
        if generation != 2 or _numbers(version) >= _OLDEST_2:
            found.append((generation, version))
    return tuple(found)


def _numbers(version: str) -> tuple[int, ...]:
    parts = [part for part in version.split("+")[0].split(".") if part.isdigit()]
    return tuple(int(part) for part in parts)


def missing(device: torch.device) -> str | None:
    """Why nothing here can run on `device`, or None."""
    if not installed():
        oldest = ".".join(map(str, _OLDEST_2))
        return f"no FlashAttention is installed (flash-attn from {oldest} on, flash-attn-3 or flash-attn-4)"
    if device.type != "cuda":
        return f"FlashAttention needs CUDA tensors, got {device.type}"
    return None


def refuses(*inputs: Any) -> str | None:
    """Why no installed FlashAttention takes these arguments of the op, or None."""
    case, device = _case(*inputs), inputs[0].device
    reasons = []
    for library in _libraries(device):
        reason = refusal(case, library)
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(dict.fromkeys(reasons))


def _libraries(device: torch.device) -> list[Library]:
    capability = torch.cuda.get_device_capability(device)
    return [Library(generation, version, capability) for generation, version in installed()]


def _case(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    block_k: torch.Tensor | None,
    block_v: torch.Tensor | None,
    block_len: torch.Tensor | None,
    window: int | None,
    window_ref: str,
    block_causal: bool,
    valid_from: torch.Tensor | None,
    scale: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *_: Any,
) -> Case:
    rows = [t for t in (q, k_cache, v_cache, block_k, block_v) if t is not None]
    longest = page_table.shape[1] * k_cache.shape[1] + (q if block_k is None else block_k).shape[1]
    return Case(
        dtype=q.dtype,
        cache_dtype=k_cache.dtype if k_cache.dtype != q.dtype else v_cache.dtype,
        head_dim=q.shape[3],
        page_size=k_cache.shape[1],
        slots=q.shape[1],
        block_rows=None if block_k is None else block_k.shape[1],
        # a window beyond the table cuts nothing, and may not fit the libraries' 32 bits
        window=None if window is None or window > longest else window,
        window_ref=window_ref,
        block_causal=block_causal,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        block_len=block_len is not None,
        valid_from=valid_from is not None,
        scales=k_scale is not None or v_scale is not None,
        aligned=all(_aligned(t) for t in rows),
    )


def _aligned(rows: torch.Tensor) -> bool:
    size = rows.element_size()
    strides = zip(rows.shape[:-1], rows.stride()[:-1], strict=True)
    offset = rows.storage_offset() * size
    return offset % 16 == 0 and all(extent < 2 or stride * size % 16 == 0 for extent, stride in strides)


def block_attention(*values: Any) -> None:
    """As `reference.block_attention`, except for the differences listed in flash.md."""
    inputs, out = values[:-2], values[-2]
    if out.numel() == 0:
        return
    reason = missing(out.device) or refuses(*inputs)
    if reason is not None:
        raise BackendUnavailable(f"block_attention: backend 'flash' was forced, but {reason}")
    case = _case(*inputs)
    library = next(found for found in _libraries(out.device) if refusal(case, found) is None)
    if library.generation == 2 and _numbers(library.version) >= _SYNCS_2 and torch.cuda.is_current_stream_capturing():
        raise BackendUnavailable(f"block_attention: {library.name} waits for the host, it cannot be captured")
    with torch.cuda.device(out.device):
        run_parts(case, _runs()[library.generation], *values)


def run_parts(
    case: Case,
    run: Run,
    q: torch.Tensor,  # [B, S, Hq, D]
    k_cache: torch.Tensor,  # [pages, P, Hkv, D]
    v_cache: torch.Tensor,  # [pages, P, Hkv, D]
    page_table: torch.Tensor,  # [B, MP]
    ctx_len: torch.Tensor,  # [B]
    block_k: torch.Tensor | None,  # [B, Sb, Hkv, D]
    block_v: torch.Tensor | None,  # [B, Sb, Hkv, D]
    block_len: torch.Tensor | None,  # [B]
    window: int | None,
    window_ref: str,
    block_causal: bool,
    valid_from: torch.Tensor | None,  # [B]
    scale: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sink: torch.Tensor | None,  # [Hq]
    out: torch.Tensor,  # [B, S, Hq, D] out
    lse: torch.Tensor,  # [B, S, Hq] out
) -> None:
    """The case's calls of one FlashAttention, merged."""
    parts = plan(case)
    assert not isinstance(parts, str)
    (pages, page_size), columns = k_cache.shape[:2], page_table.shape[1]
    block_rows = case.slots if block_k is None else block_k.shape[1]
    rows = torch.full_like(ctx_len, block_rows) if block_len is None else block_len.clamp(0, block_rows)
    context = ctx_len.long()
    stored = context + rows if block_k is None else context
    live = (context >= 0) & (stored <= columns * page_size)
    context, stored = (torch.where(live, length, 0) for length in (context, stored))
    rows = torch.where(live, rows, 0)
    skip = None if valid_from is None else torch.minimum(valid_from.long().clamp(min=0), context)
    unmapped = _unmapped(page_table, pages, page_size, _first_row(case, context, skip, block_rows), stored)
    table = page_table.clamp(0, max(pages - 1, 0)).int().contiguous()

    merged = _Merge(out, sink)
    for part in parts:
        if part.keys == "block":
            assert block_k is not None and block_v is not None
            keys, values, lengths, paged, left = block_k, block_v, rows, None, None
        elif pages * columns == 0:
            continue
        else:
            lengths = stored if part.keys == "cache" else context
            keys, values, paged, left = k_cache, v_cache, table, skip
        empty = lengths == 0 if left is None else lengths == left
        if left is not None:
            lengths, left = torch.where(empty, 0, lengths), torch.where(empty, 0, left).int()
        queries = _fold(q, k_cache.shape[2]) if part.folded else q
        got, logs = run(queries, keys, values, part, lengths.int(), paged, left, case.scale, soft_cap or 0.0)
        logs = logs.transpose(1, 2)
        if part.folded:
            got, logs = _unfold(got, q.shape, k_cache.shape[2]), _unfold(logs, q.shape[:3], k_cache.shape[2])
        merged.add(got, logs, empty)
    merged.write(out, lse, unmapped & live)


def _first_row(case: Case, context: torch.Tensor, skip: torch.Tensor | None, block_rows: int) -> torch.Tensor:
    """First context row that any query sees, `[B]`."""
    first = torch.zeros_like(context)
    if case.window is not None:
        before = case.window if case.window_ref == "anchor" else case.window - 1 - (block_rows - case.slots)
        first = (context - max(before, 0)).clamp(min=0)
    return first if skip is None else torch.maximum(first, skip)


def _unmapped(
    page_table: torch.Tensor, pages: int, page_size: int, first: torch.Tensor, stored: torch.Tensor
) -> torch.Tensor:
    """Requests `[B]` in which a visible row has a page id outside the cache."""
    start = torch.arange(page_table.shape[1], device=page_table.device) * page_size  # [MP]
    visible = (start < stored[:, None]) & (start + page_size > first[:, None]) & (first < stored)[:, None]
    return (visible & ((page_table < 0) | (page_table >= pages))).any(dim=1)


def _fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[B, S, Hq, D]` -> `[B, 1, Hkv * S * group, D]`."""
    batch, slots, heads, dim = q.shape
    return q.view(batch, slots, kv_heads, heads // kv_heads, dim).transpose(1, 2).reshape(batch, 1, slots * heads, dim)


def _unfold(folded: torch.Tensor, shape: torch.Size, kv_heads: int) -> torch.Tensor:
    batch, slots, heads = shape[:3]
    grouped = folded.reshape(batch, kv_heads, slots, heads // kv_heads, *folded.shape[3:])
    return grouped.transpose(1, 2).reshape(shape)


class _Merge:
    """Sums partial results by their log-sum-exp; the sink joins the denominator alone."""

    def __init__(self, out: torch.Tensor, sink: torch.Tensor | None) -> None:
        self.outs: list[torch.Tensor] = []
        self.logs = [out.new_full(out.shape[:3], -torch.inf, dtype=torch.float32)]
        self.sink = None if sink is None else sink.float()

    def add(self, out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor) -> None:
        # FlashAttention 2 says +inf of an empty set
        self.outs.append(out)
        self.logs.append(torch.where(empty[:, None, None], -torch.inf, lse))

    def write(self, out: torch.Tensor, lse: torch.Tensor, broken: torch.Tensor) -> None:
        logs = torch.stack(self.logs)  # [1 + parts, B, S, Hq]
        none = (logs == -torch.inf).all(dim=0)
        top = logs.amax(dim=0) if self.sink is None else torch.maximum(logs.amax(dim=0), self.sink)
        top = torch.where(none, 0.0, top)
        weights = (logs - top).exp()
        total = weights.sum(dim=0)
        if self.sink is not None:
            total = total + (self.sink - top).exp()
        mean = torch.zeros_like(out, dtype=torch.float32)
        for part, weight in zip(self.outs, weights[1:], strict=True):
            # an empty part holds zeros at best
            mean += torch.where(weight[..., None] == 0, 0.0, part.float() * (weight / total)[..., None])
        out.copy_(torch.where(none[..., None], 0.0, mean))
        lse.copy_(torch.where(none, -torch.inf, top + total.log()))
        for result in (out, lse):
            result.masked_fill_(broken.view(-1, *[1] * (result.dim() - 1)), torch.nan)


def _runs() -> dict[int, Run]:
    return {2: _run_2, 3: _run_3, 4: _run_4}


# one split: the libraries' own choice depends on the batch, and with it a request's bits would
def _run_2(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, lengths: torch.Tensor,
    table: torch.Tensor | None, skip: torch.Tensor | None, scale: float, soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert skip is None
    result = importlib.import_module("flash_attn").flash_attn_with_kvcache(
        q, keys, values, cache_seqlens=lengths, block_table=table, softmax_scale=scale, causal=_is_causal(part),
        window_size=(part.left, part.right), softcap=soft_cap, num_splits=1, return_softmax_lse=True,
    )  # fmt: skip
    return result[0], result[1]


def _run_3(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, lengths: torch.Tensor,
    table: torch.Tensor | None, skip: torch.Tensor | None, scale: float, soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    result = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
        q, keys, values, cache_seqlens=lengths, cache_leftpad=skip, page_table=table, softmax_scale=scale,
        causal=_is_causal(part), window_size=(part.left, part.right), softcap=soft_cap, num_splits=1,
        return_softmax_lse=True,
    )  # fmt: skip
    return result[0], result[1]


def _run_4(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, lengths: torch.Tensor,
    table: torch.Tensor | None, skip: torch.Tensor | None, scale: float, soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert skip is None
    window = tuple(None if bound == NO_BOUND else bound for bound in (part.left, part.right))
    result = importlib.import_module("flash_attn.cute").flash_attn_varlen_func(
        q, keys, values, seqused_k=lengths, page_table=table, softmax_scale=scale, causal=_is_causal(part),
        window_size=window, softcap=soft_cap, num_splits=1, return_lse=True,
    )  # fmt: skip
    return result[0], result[1]


def _is_causal(part: Part) -> bool:
    return part.left == NO_BOUND and part.right == 0
