"""Paged key/value caches and the pool that accounts for their pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dmtp_kernels.models.config import LayerConfig


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """Hands out page ids 1..num_pages; page 0 is never owned, so a zeroed table entry names no request's page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: is {num_pages}, must be at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._owner: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages some request owns; `free + used == num_pages` always."""
        return len(self._owner)

    def owned_by(self, owner: int) -> list[int]:
        """Pages of one owner, ascending."""
        return sorted(page for page, who in self._owner.items() if who == owner)

    def allocate(self, count: int, owner: int) -> list[int]:
        """Take `count` pages for `owner`, all or none.

        Raises:
            OutOfPages: fewer than `count` pages are free.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self._owner.update(dict.fromkeys(pages, owner))
        return pages

    def release(self, pages: list[int], owner: int) -> None:
        """Give pages back. Raises `ValueError`, and frees nothing, if one of them is not the owner's."""
        wrong = [page for page in pages if self._owner.get(page) != owner]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages: {wrong or pages} are not owned by request {owner} or are listed twice")
        for page in pages:
            del self._owner[page]
            self._free.append(page)


def pages_for(rows: int, page_size: int) -> int:
    """Pages that `rows` rows need."""
    return -(-rows // page_size)


@dataclass
class PagedCache:
    """K and V pages of every layer: `k[l]`, `v[l]` are `[num_pages + 1, page_size, Hkv, D]`; page 0 is never used."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int
    pool: PagePool
    flat_k: list[torch.Tensor] = field(init=False)
    flat_v: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.flat_k = [pages.flatten(0, 1) for pages in self.k]
        self.flat_v = [pages.flatten(0, 1) for pages in self.v]

    @classmethod
    def create(
        cls,
        layer: LayerConfig,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedCache:
        """Cache of `num_pages` pages, filled with NaN: a row that was never written must never be read."""
        shape = (num_pages + 1, page_size, layer.num_kv_heads, layer.head_dim)

        def pages() -> list[torch.Tensor]:
            return [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(num_layers)]

        return cls(pages(), pages(), page_size, PagePool(num_pages))


def slots_of(table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slot of each position: `table[B, MP]`, `positions[B, T]` -> `[B, T]` int64; -1 for positions outside the
    table."""
    page = torch.div(positions, page_size, rounding_mode="floor")
    inside = (positions >= 0) & (page < table.shape[1])
    entry = table.gather(1, page.clamp(0, table.shape[1] - 1)).long()
    return torch.where(inside, entry * page_size + positions % page_size, -1)
