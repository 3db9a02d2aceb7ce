"""Calls of block attention for the emulated CUDA kernels, with poison in all they must not read, and their truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels import backends
from dmtp_kernels.ops.block_attention import cuda
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.cuda_host import host
from tests.cuda_host.cases import CPU, same
from tests.cuda_host.fence import Fenced
from tests.cuda_host.prep_cases import Scratch
from tests.ops.block_attention_oracle import oracle, visible

OP = "block_attention"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = (
    "block_k", "block_v", "block_len", "window", "window_ref", "block_causal", "valid_from", "scale", "k_scale",
    "v_scale", "soft_cap", "sink",
)  # fmt: skip
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)
"""Of a page table's columns that no visible row needs."""


def attention_case(
    lengths: Sequence[int],
    slots: int,
    heads: tuple[int, int],
    dim: int,
    page_size: int = 16,
    *,
    dtype: torch.dtype = BF16,
    cache: tuple[torch.dtype, torch.dtype] | None = None,
    dense: int | None = None,
    window: int | None = None,
    by_query: bool = False,
    causal: bool = False,
    valid_from: Sequence[int] | None = None,
    block_len: Sequence[int] | None = None,
    scales: tuple[int, ...] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink: torch.dtype | None = None,
    packed: bool = False,
    spread: float = 1.0,
    draw: int = 0,
) -> tuple[Any, ...]:
    """One call, its options in the order of the schema.

    Args:
        cache: dtypes of K and V where they are fp8; one where they are packed.
        dense: rows of a dense block; None: in the cache.
        scales: shape of both scales.
        packed: K and V are halves of one buffer with heads before rows.
        spread: of the scores' standard deviation, beside 1.
    """
    generator = torch.Generator().manual_seed(draw)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, rows = len(lengths), slots if dense is None else dense
    options: dict[str, Any] = {
        "window": window, "window_ref": "query" if by_query else "anchor", "block_causal": causal, "scale": scale,
        "soft_cap": soft_cap, **dict.fromkeys(OPTIONS[:3] + OPTIONS[6:7]),
    }  # fmt: skip
    for name, given in (("valid_from", valid_from), ("block_len", block_len)):
        options[name] = None if given is None else torch.tensor(given)
    for name in ("k_scale", "v_scale"):
        options[name] = None if scales is None else torch.rand(scales, generator=generator) + 0.5
    options["sink"] = None if sink is None else normal(heads[0]).to(sink)

    pages = -(-(max(lengths) + rows) // page_size)
    order = torch.randperm(batch * pages + 2, generator=generator)
    table = torch.tensor(GARBAGE).repeat(pages)[: pages + 3].repeat(batch, 1)
    shape = (len(order), page_size, heads[1], dim)
    if packed:
        buffer = torch.full((shape[0], heads[1], page_size, 2 * dim), float("nan")).transpose(1, 2)
    else:
        buffer = torch.full((*shape[:3], 2 * dim), float("nan"))
    seen = seen_rows(lengths, slots, rows, options)
    for b, mine in enumerate(seen):
        kept = np.flatnonzero(mine[: lengths[b] + (rows if dense is None else 0)])
        own = order[b * pages : (b + 1) * pages]
        table[b, np.unique(kept // page_size)] = own[np.unique(kept // page_size)]
        buffer[own[kept // page_size], kept % page_size] = normal(len(kept), heads[1], 2 * dim)
    kinds = cache or (dtype, dtype)
    halves = (buffer.to(kinds[0]) if packed else buffer).split(dim, dim=-1)
    caches = halves if packed else [half.contiguous().to(kind) for half, kind in zip(halves, kinds, strict=True)]
    if dense is not None:
        for name in OPTIONS[:2]:
            options[name] = normal(batch, dense, heads[1], dim).to(dtype)
            for b, mine in enumerate(seen):
                options[name][b, ~mine[lengths[b] :]] = float("nan")
    q = (spread * normal(batch, slots, heads[0], dim)).to(dtype)
    ctx_len = torch.tensor(lengths, dtype=torch.int32 if draw % 2 else torch.int64)
    return q, *caches, table.int() if draw % 2 == 0 else table, ctx_len, *(options[name] for name in OPTIONS)


def seen_rows(lengths: Sequence[int], slots: int, rows: int, options: dict[str, Any]) -> list[Any]:
    """`[ctx_len + rows]` bool of each request: the positions that some query sees."""
    return [mask_of(b, lengths, slots, rows, options).any(axis=0) for b in range(len(lengths))]


def mask_of(b: int, lengths: Sequence[int], slots: int, rows: int, options: dict[str, Any]) -> Any:
    """`[S, ctx_len + rows]` bool of a request."""
    own = {n: None if options[n] is None else int(options[n][b]) for n in ("valid_from", "block_len")}
    return visible(
        int(lengths[b]), slots, rows, window=options["window"], window_ref=options["window_ref"],
        block_causal=options["block_causal"], valid_from=own["valid_from"] or 0, block_len=own["block_len"],
    )  # fmt: skip


def eager(inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The call in plain PyTorch at `dtype`."""
    q, caches, table, ctx_len = inputs[0], inputs[1:3], inputs[3], inputs[4].tolist()
    options = dict(zip(OPTIONS, inputs[5:], strict=True))
    batch, slots, q_heads, dim = q.shape
    page_size, heads = caches[0].shape[1:3]
    blocks = options["block_k"], options["block_v"]
    rows = slots if blocks[0] is None else blocks[0].shape[1]
    out, lse = torch.zeros(q.shape, dtype=dtype), torch.full(q.shape[:3], float("-inf"), dtype=dtype)
    for b in range(batch):
        mask = torch.from_numpy(mask_of(b, ctx_len, slots, rows, options))
        at = mask.any(dim=0).nonzero()[:, 0]
        if len(at) == 0:
            continue
        lists = []
        for cache, block, name in zip(caches, blocks, ("k_scale", "v_scale"), strict=True):
            cached = at if block is None else at[at < ctx_len[b]]
            factor = torch.ones(()) if options[name] is None else options[name]
            factor = factor.expand(batch, heads)[b, :, None]
            read = (cache.view(torch.uint8) if cache.element_size() == 1 else cache)[
                table[b, cached // page_size].long(), cached % page_size
            ]
            parts = [(read.view(cache.dtype).float() * factor).to(dtype)]
            if block is not None:
                parts.append(block[b, at[at >= ctx_len[b]] - ctx_len[b]].to(dtype))
            lists.append(torch.cat(parts).transpose(0, 1).repeat_interleave(q_heads // heads, dim=0))  # [Hq, n, D]
        scores = q[b].to(dtype).transpose(0, 1) @ lists[0].transpose(1, 2)
        scores = scores * (dim**-0.5 if options["scale"] is None else options["scale"])
        if options["soft_cap"] is not None:
            scores = torch.tanh(scores / options["soft_cap"]) * options["soft_cap"]
        scores = scores.masked_fill(~mask[:, at], float("-inf"))
        if options["sink"] is not None:
            scores = torch.cat([scores, options["sink"].to(dtype)[:, None, None].expand(-1, slots, 1)], dim=2)
        live = mask.any(dim=1)
        weights = scores.softmax(-1)[:, :, : len(at)]
        out[b, live] = (weights @ lists[1]).transpose(0, 1)[live]
        lse[b, live] = scores.logsumexp(-1).transpose(0, 1)[live]
    return out, lse


class Attended:
    """One call: the first run is held against the truth, all others must give its bits."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs
        q = inputs[0]
        outputs = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"))
        self._placed = [Fenced([*inputs, *outputs], at_end) for at_end in (True, False)]
        self._scratch = Scratch()
        self.first: tuple[torch.Tensor, torch.Tensor] | None = None

    def differs(self, seed: int) -> str | None:
        """What is wrong after a run under schedule `seed`, None where nothing is. Guards are checked."""
        placed = self._placed[seed % 2]
        placed.restore()
        self._scratch.fill = (-1, -(1 << 31), 0x7F7F7F7F)[seed % 3]
        host.seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "workspace", self._scratch)
            try:
                backends.implementation(OP, CPU)(*placed.arguments)
                placed.check()
                self._scratch.check()
                assert host.launches() > 0, "the reference ran"
            except (AssertionError, RuntimeError) as error:
                return str(error)
        out, lse = placed.arguments[len(self.inputs) :]
        if self.first is not None:
            return None if same(out, self.first[0]) and same(lse, self.first[1]) else "not the bits of the first run"
        return self._against_truth(out.clone(), lse.clone())

    def _against_truth(self, out: torch.Tensor, lse: torch.Tensor) -> str | None:
        truth = oracle(*self.inputs[:5], **dict(zip(OPTIONS, self.inputs[5:], strict=True)))
        try:
            assert_within_budget(out, truth[0], eager(self.inputs, out.dtype)[0], name="out")
            assert_within_budget(lse, truth[1], eager(self.inputs, FP32)[1], name="lse")
        except AssertionError as error:
            return str(error)
        self.first = out, lse
        return None
