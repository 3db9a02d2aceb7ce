"""`dmtp bench block_attention`: the op against pages gathered for torch's own attention with a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dmtp_kernels import backends
from dmtp_kernels.bench.measure import compare, compiled, report
from dmtp_kernels.bench.progress import Report, silent
from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.block_attention.spec import SPEC

OP = "block_attention"
BASELINES = ("eager", "compiled")
ENTRIES = (*backends.NAMES, *BASELINES)
"""The op by the backend that runs it, and the two chains it replaces."""


@dataclass(frozen=True)
class Shape:
    """B requests of S queries over `history` context rows in pages of P.

    `window` rows of the context are seen and the block both ways; None: the whole context, block causal.
    """

    B: int
    history: int
    S: int = 8
    Hq: int = 16
    Hkv: int = 2
    D: int = 256
    P: int = 16
    window: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "window" else 1
            if value is not None and value < least:
                raise ValueError(f"{name}: is {value}, must be at least {least}")
        if self.Hq % self.Hkv != 0:
            raise ValueError(f"Hq: is {self.Hq}, must be a multiple of Hkv, {self.Hkv}")


class Problem:
    """bf16 tensors of one shape: pages in shuffled order, the block dense."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        pages = -(-shape.history // shape.P)
        self.q = normal(shape.B, shape.S, shape.Hq, shape.D)
        self.k, self.v = (normal(shape.B * pages, shape.P, shape.Hkv, shape.D) for _ in range(2))
        self.block_k, self.block_v = (normal(shape.B, shape.S, shape.Hkv, shape.D) for _ in range(2))
        order = torch.randperm(shape.B * pages, generator=generator, device=device)
        self.table = order.view(shape.B, pages).to(torch.int32)
        self.ctx_len = torch.full((shape.B,), shape.history, dtype=torch.int32, device=device)
        self.first = 0 if shape.window is None else max(0, shape.history - shape.window)
        rows = torch.arange(shape.S, device=device)
        seen = torch.ones(shape.S, shape.history - self.first, dtype=torch.bool, device=device)
        block = torch.ones(shape.S, shape.S, dtype=torch.bool, device=device)
        if shape.window is None:
            block = rows[None] <= rows[:, None]
        self.mask = torch.cat((seen, block), dim=1)

    def op(self) -> torch.Tensor:
        return block_attention(
            self.q,
            self.k,
            self.v,
            self.table,
            self.ctx_len,
            block_k=self.block_k,
            block_v=self.block_v,
            window=self.shape.window,
            block_causal=self.shape.window is None,
        ).out

    def eager(self) -> torch.Tensor:
        """Only the pages that are seen are gathered."""
        page = self.first // self.shape.P
        rows = slice(self.first - page * self.shape.P, self.shape.history - page * self.shape.P)
        keys, values = (
            torch.cat((cache[self.table[:, page:].long()].flatten(1, 2)[:, rows], block), dim=1).transpose(1, 2)
            for cache, block in ((self.k, self.block_k), (self.v, self.block_v))
        )
        q = self.q.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2)

    def bytes(self) -> int:
        """What a perfect kernel moves."""
        shape = self.shape
        inputs = (self.q, self.k, self.v, self.table, self.ctx_len, self.block_k, self.block_v, None)
        rules = (shape.window, "anchor", shape.window is None, None, None, None, None, None, None)
        return SPEC.floor_bytes(*inputs, *rules)


def bench_attention(
    shapes: Sequence[Shape],
    entries: Sequence[str] | None = None,
    rounds: int = 15,
    device: torch.device | None = None,
    say: Report = silent,
) -> dict[str, Any]:
    """Time block attention by shape.

    Args:
        shapes: each is a group of its own.
        entries: among `ENTRIES`, default the backend that the op uses, `eager` and `compiled`; `eager` always runs, as
            the yardstick.
        rounds: timed rounds, interleaved over the entries.
        device: default CPU.
        say: told what is being done.

    Returns:
        As `measure.report`, and `skipped`: entry -> why it was not measured.

    Raises:
        ValueError: an unknown entry, or a size below 1.
    """
    device = device or torch.device("cpu")
    wanted = (backends.choose(OP, device), *BASELINES) if entries is None else entries
    unknown = [e for e in wanted if e not in ENTRIES]
    if unknown:
        raise ValueError(f"entries: has {unknown[0]!r}, must be among {', '.join(ENTRIES)}")
    skipped: dict[str, str] = {}

    def group(shape: Shape) -> tuple[list[dict[str, Any]], float]:
        problem = Problem(shape, device)
        found = runs(problem, [*dict.fromkeys((*wanted, "eager"))], skipped)
        return compare(OP, asdict(shape), found, lambda _: problem.bytes(), rounds, device, say)

    return {**report(OP, map(group, shapes), rounds, device), "skipped": skipped}


def runs(problem: Problem, entries: Sequence[str], skipped: dict[str, str]) -> dict[str, Callable[[], object]]:
    """What each entry runs; one that cannot be built is named in `skipped` with the reason."""
    found: dict[str, Callable[[], object]] = {}
    for entry in entries:
        run, reason = _run(problem, entry)
        if run is None:
            skipped[entry] = str(reason)
        else:
            found[entry] = run
    return found


def _run(problem: Problem, entry: str) -> tuple[Callable[[], object] | None, str | None]:
    if entry == "eager":
        return problem.eager, None
    if entry == "compiled":
        return compiled(problem.eager)
    reason = backends.unavailable(OP, entry, problem.q.device)
    if reason is not None:
        return None, reason

    def forced() -> torch.Tensor:
        with backends.use_backend(entry, OP):
            return problem.op()

    return forced if entry != backends.choose(OP, problem.q.device) else problem.op, None
