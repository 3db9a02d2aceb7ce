"""Everything a round needs to know about its requests, on the device, one row per request."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from dmtp_kernels.ops.accept import Acceptance

MAX_ROWS = 8
"""R: verify rows and MTP advancement rows reserved per request."""
MAX_STOP_IDS = 4


@dataclass
class BatchState:
    """State of B requests; row b of every tensor belongs to request b.

    `length[b]` = a: rows in the target's cache and position of the anchor, which the target has not processed. The
    drafter's context holds the same a rows. The MTP history holds a - 1 rows; row a - 1 (the anchor's) is in the
    pending slot, `tail_slots[b, 0]`; `tail_slots[b, 1:]` are the private scratch slots. `budget` counts tokens still
    to be emitted; a row whose budget is 0 is inert.
    """

    anchor: torch.Tensor  # [B] int64
    length: torch.Tensor  # [B] int64
    budget: torch.Tensor  # [B] int64
    finished: torch.Tensor  # [B] int32: 0 running, 1 stop token, 2 length
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

    @classmethod
    def create(
        cls, max_batch: int, max_pages: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> BatchState:
        """State with room for `max_batch` requests, all rows inert."""

        def full(shape: tuple[int, ...], value: float, kind: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=kind, device=device)

        batch = (max_batch,)
        table = (max_batch, max_pages)
        return cls(
            anchor=full(batch, 0),
            length=full(batch, 0),
            budget=full(batch, 0),
            finished=full(batch, 0, torch.int32),
            h_mtp=full((max_batch, hidden), 0.0, dtype),
            temperature=full(batch, 0.0, torch.float32),
            top_k=full(batch, 0),
            top_p=full(batch, 1.0, torch.float32),
            seed=full(batch, 0),
            stop_ids=full((max_batch, MAX_STOP_IDS), -1),
            target_table=full(table, 0, torch.int32),
            drafter_table=full(table, 0, torch.int32),
            mtp_table=full(table, 0, torch.int32),
            tail_slots=full((max_batch, 1 + MAX_ROWS), -1),
        )

    def rows(self, start: int, stop: int) -> BatchState:
        """Views of rows start..stop-1: writing to them writes here."""
        return BatchState(**{f.name: getattr(self, f.name)[start:stop] for f in fields(self)})

    def move(self, source: int, destination: int) -> None:
        """Copy row `source` over row `destination`; no cache row moves, only its tables."""
        for f in fields(self):
            getattr(self, f.name)[destination].copy_(getattr(self, f.name)[source])

    def clear(self, row: int) -> None:
        """Make a row inert and forget its tables, so that nothing of an earlier request can be reached through it."""
        blank = BatchState.create(
            1, self.target_table.shape[1], self.h_mtp.shape[1], self.h_mtp.dtype, self.anchor.device
        )
        for f in fields(self):
            getattr(self, f.name)[row].copy_(getattr(blank, f.name)[0])

    def advance(self, accepted: Acceptance) -> None:
        """Move every row past its committed tokens, in place."""
        emitted = accepted.commit_len.long()
        moved = emitted > 0
        self.length += emitted
        self.anchor.copy_(torch.where(moved, accepted.bonus, self.anchor))
        self.finished.copy_(torch.where(moved, accepted.finished, self.finished))
        remaining = self.budget - emitted
        self.budget.copy_(torch.where(self.finished > 0, 0, remaining))
