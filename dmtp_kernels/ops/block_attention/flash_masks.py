"""Which cases of block attention FlashAttention expresses exactly, as which calls, and why not the others.

Nothing here imports FlashAttention or reads a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_BOUND = -1


@dataclass(frozen=True)
class Case:
    """What decides of one call, all of it known from shapes and options."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    page_size: int
    slots: int
    block_rows: int | None
    """Sb of a dense block; None: the block lies in the cache."""
    window: int | None
    window_ref: str
    block_causal: bool
    scale: float
    block_len: bool = False
    """Whether it is given, as for the next two."""
    valid_from: bool = False
    scales: bool = False
    aligned: bool = True
    """Whether every row of q, K and V starts at a multiple of 16 bytes."""


@dataclass(frozen=True)
class Library:
    """An installed FlashAttention and the device it would run on."""

    generation: int  # 2, 3 or 4
    version: str
    capability: tuple[int, int]

    @property
    def name(self) -> str:
        return f"FlashAttention {self.generation} ({self.version})"


@dataclass(frozen=True)
class Part:
    """One call: query i of n sees the keys j of m with `i + m - n - left <= j <= i + m - n + right`.

    `keys`: `"cache"` the context and the block through the page table, `"context"` the context alone, `"block"` the
    dense block. `folded` turns the slots into heads, so that all of them are the last query.
    """

    keys: str
    left: int = NO_BOUND
    right: int = NO_BOUND
    folded: bool = False


def plan(case: Case) -> tuple[Part, ...] | str:
    """Calls whose visible sets are disjoint and together the case's, or why there are none.

    No call at all leaves every output empty.
    """
    if case.window == 0 and case.window_ref == "query":
        return ()
    block = _block_part(case)
    moves = block.left != NO_BOUND or (block.right != NO_BOUND and case.slots > 1)
    if case.block_len and moves:
        return "block_len: with block_causal or a window FlashAttention's mask hangs on the last key, which it moves"
    if case.block_rows is not None:
        context = _context_part(case, case.block_rows)
        if isinstance(context, str):
            return context
        return (block,) if context is None else (context, block)
    if case.window is None or case.window_ref == "query":
        return (Part("cache", block.left, block.right),)
    if case.slots > 1:
        return (
            "window: the anchor rule is the same for all queries and FlashAttention's window moves with them; it takes "
            "a dense block (block_k, block_v), or a draft page table instead of the window"
        )
    if case.block_len:
        return "block_len: with a window FlashAttention's mask hangs on the last key, which it moves"
    return (Part("cache", case.window, 0),)


def _block_part(case: Case) -> Part:
    right = 0 if case.block_causal else NO_BOUND
    if case.window is None or case.window_ref == "anchor":
        return Part("block", NO_BOUND, right)
    reach = case.window - 1
    return Part("block", reach, 0 if case.block_causal else reach)


def _context_part(case: Case, block_rows: int) -> Part | str | None:
    """The context of a dense block: all of it precedes every query."""
    if case.window is None:
        return Part("context")
    if case.window_ref == "anchor":
        return Part("context", case.window - 1, 0, folded=True) if case.window > 0 else None
    # the call's last query has the last context row's position, the case's one `block_rows` later
    left = case.window - 1 - block_rows
    if left >= 0:
        return Part("context", left, case.slots - 1)
    if case.window <= block_rows - case.slots + 1:
        return None
    return f"window: {case.window} ends inside a dense block of {block_rows} rows, FlashAttention's cannot start there"


def refusal(case: Case, library: Library) -> str | None:
    """Why `library` cannot run `case`, or None when it can."""
    major = library.capability[0]
    generation = library.generation
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"q: dtype is {case.dtype}, FlashAttention takes torch.float16 and torch.bfloat16"
    if case.cache_dtype != case.dtype:
        return f"k_cache: dtype is {case.cache_dtype}, FlashAttention takes the dtype of q alone"
    if case.scales:
        return "k_scale, v_scale: FlashAttention scales fp8 keys and values only"
    if not case.scale > 0:
        return f"scale: is {case.scale}, FlashAttention takes positive ones"
    if case.head_dim % 8 or case.head_dim > 256:
        return f"q: head dimension is {case.head_dim}, FlashAttention takes multiples of 8 up to 256"
    if not case.aligned:
        return "k_cache, v_cache: FlashAttention reads rows that start at multiples of 16 bytes"
    if case.valid_from and generation != 3:
        return f"valid_from: {library.name} has no left bound per request over pages, FlashAttention 3 has"
    if generation == 2:
        if major < 8:
            return f"{library.name} needs compute capability 8.0, the device has {_dotted(library.capability)}"
        if case.page_size % 256:
            return f"k_cache: pages have {case.page_size} rows, {library.name} takes multiples of 256"
    elif generation == 3:
        if major != 9:
            return f"{library.name} is for compute capability 9.0, the device has {_dotted(library.capability)}"
    else:
        if major not in (9, 10, 11):
            return f"{library.name} has no paged kernel for compute capability {_dotted(library.capability)}"
        if major > 9 and case.head_dim > 128:
            return f"q: head dimension is {case.head_dim}, {library.name} takes up to 128 with pages on this device"
    masks = plan(case)
    return masks if isinstance(masks, str) else None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
