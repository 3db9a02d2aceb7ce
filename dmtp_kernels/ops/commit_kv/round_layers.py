"""Which of the flat lists of a commit of several caches belongs to which cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheLayers:
    """Layers `first` .. `last - 1` are those of cache `index` of `count`."""

    index: int
    count: int
    first: int
    last: int

    def scales(self, scales: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
        """One scale for all layers of this cache or one a layer, from a list of one a cache or one a layer."""
        if scales is None:
            return None
        per_cache = len(scales) == self.count
        own = scales[self.index : self.index + 1] if per_cache else scales[self.first : self.last]
        return None if is_absent(own[0]) else own


def cache_layers(layers: Sequence[int]) -> Iterator[CacheLayers]:
    """The layers of each cache, `layers[c]` of them."""
    first = 0
    for index, count in enumerate(layers):
        yield CacheLayers(index, len(layers), first, first + count)
        first += count


def is_absent(scale: torch.Tensor) -> bool:
    """An empty vector stands for no scale."""
    return scale.dim() == 1 and scale.shape[0] == 0
