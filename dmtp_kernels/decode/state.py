"""Everything a round needs to know about its requests, on the device, one row per request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.stack import MAX_ROWS, Stack
from dmtp_kernels.decode.work import Work
from dmtp_kernels.ops.advance import RoundIndex

MAX_STOP_IDS = 4


@dataclass
class Sampling:
    """Sampling parameters of every verify row, `[B, R]` each: a request's own, repeated."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor


@dataclass
class BatchState:
    """State of B requests; row b of every tensor belongs to request b.

    `length[b]` = a: rows in the target's cache and position of the anchor, which the target has not processed. The
    drafter's context holds the same a rows. The MTP history holds a - 1 rows; row a - 1 (the anchor's) is in the
    pending slot, `tail_slots[b, 0]`; `tail_slots[b, 1:]` are the private scratch slots. `budget` counts tokens still
    to be emitted; a row whose budget is 0 is inert.

    `index` and `sampling` follow from the rest: `round.refresh` writes them after the host changed a row, every round
    keeps them current.
    """

    anchor: torch.Tensor  # [B] int64
    length: torch.Tensor  # [B] int64
    budget: torch.Tensor  # [B] int64
    finished: torch.Tensor  # [B] int32: 0 running, 1 stop token, 2 length
    num_candidates: torch.Tensor  # [B] int64, candidates a round may accept
    mtp_steps: torch.Tensor  # [B] int64, candidates that MTP proposes before the drafter continues
    recent: torch.Tensor  # [B] fp32, running mean of accepted candidates
    h_mtp: torch.Tensor  # [B, H]
    temperature: torch.Tensor  # [B] fp32
    top_k: torch.Tensor  # [B] int64, 0 = off
    top_p: torch.Tensor  # [B] fp32, 1 = off
    seed: torch.Tensor  # [B] int64
    stop_ids: torch.Tensor  # [B, MAX_STOP_IDS] int64, -1 = none
    target_table: torch.Tensor  # [B, MP] int32
    drafter_table: torch.Tensor  # [B, MP] int32
    mtp_table: torch.Tensor  # [B, MP] int32
    tail_slots: torch.Tensor  # [B, 1 + MAX_ROWS] int64
    grants: torch.Tensor  # [B, G, 3] int32, pages for the next rounds: (table, column, page), table -1 = unused
    idle: torch.Tensor  # [B] int64, zeros
    index: RoundIndex
    sampling: Sampling
    work: Work = field(default_factory=Work)
    """What the stages of one round leave for each other, of these rows."""

    @classmethod
    def create(cls, stack: Stack, max_batch: int, max_pages: int) -> BatchState:
        """State with room for `max_batch` requests, all rows inert."""
        weight = stack.target.embed_tokens.weight
        rows, tables, block = stack.rows, len(stack.owners), stack.known_slots

        def full(shape: tuple[int, ...], value: float, kind: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((max_batch, *shape), value, dtype=kind, device=weight.device)

        return cls(
            anchor=full((), 0),
            length=full((), 0),
            budget=full((), 0),
            finished=full((), 0, torch.int32),
            num_candidates=full((), stack.method.num_candidates),
            mtp_steps=full((), 1),
            recent=full((), 0.0, torch.float32),
            h_mtp=full((weight.shape[1],), 0.0, weight.dtype),
            temperature=full((), 0.0, torch.float32),
            top_k=full((), 0),
            top_p=full((), 1.0, torch.float32),
            seed=full((), 0),
            stop_ids=full((MAX_STOP_IDS,), -1),
            target_table=full((max_pages,), 0, torch.int32),
            drafter_table=full((max_pages,), 0, torch.int32),
            mtp_table=full((max_pages,), 0, torch.int32),
            tail_slots=full((1 + MAX_ROWS,), -1),
            grants=full((tables * grants_of(rows, stack.target_cache.page_size), 3), -1, torch.int32),
            idle=full((), 0),
            index=RoundIndex(
                positions=full((rows,), 0),
                token_positions=full((rows,), 0),
                context_len=full((), 0),
                history_len=full((), 0),
                slots=full((tables, rows), -1),
                previous_slots=full((tables,), -1),
                block_ids=full((block,), 0),
                error=full((), 0, torch.int32),
            ),
            sampling=Sampling(
                full((rows,), 0.0, torch.float32), full((rows,), 0), full((rows,), 1.0, torch.float32), full((rows,), 0)
            ),
        )

    def rows(self, start: int, stop: int) -> BatchState:
        """Views of rows start..stop-1: writing to them writes here. What its stages leave is its own."""
        views: dict[str, Any] = {name: value[start:stop] for name, value in self._tensors().items()}
        index = RoundIndex(*[t[start:stop] for t in self.index])
        sampling = Sampling(*[getattr(self.sampling, f.name)[start:stop] for f in fields(Sampling)])
        return BatchState(**views, index=index, sampling=sampling)

    def move(self, source: int, destination: int) -> None:
        """Copy row `source` over row `destination`; no cache row moves, only its tables. Refresh before a round."""
        for tensor in self._tensors().values():
            tensor[destination].copy_(tensor[source])

    def clear(self, row: int, candidates: int) -> None:
        """Make a row inert and forget its tables, so that nothing of an earlier request can be reached through it.
        `candidates` is the next request's limit. Refresh before a round."""
        for name, tensor in self._tensors().items():
            tensor[row].fill_(_BLANK.get(name, 0))
        self.num_candidates[row].fill_(candidates)

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}


_BLANK = {"mtp_steps": 1, "top_p": 1.0, "stop_ids": -1, "tail_slots": -1, "grants": -1}


def grants_of(rows: int, page_size: int) -> int:
    """Pages of one cache that a request can come to need from one round of `rows` rows to the next."""
    return pages_for(rows, page_size) + 1
