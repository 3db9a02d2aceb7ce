"""Philox4x32-10, the counter-based generator behind every draw, in int64 torch arithmetic.

A draw is named by (seed, position, stream, index) and by nothing else: not by the batch, not by a call count. Key =
the seed's low and high 32 bits; counter = (index // 4, stream, position low, position high); the draw is output word
index % 4.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

SAMPLE, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
"""Streams. `SAMPLE`: the target's own tokens; `DRAFT`: a drafter's; `ACCEPT`, `RESIDUAL`: rejection sampling."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_ROW_BITS = 8


def philox4x32(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds. All arguments int64 tensors that broadcast, each holding one unsigned 32-bit word."""
    for i in range(_ROUNDS):
        # products wrap modulo 2^64 and shifts carry the sign; the mask leaves the true high word
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        r0, r1 = k0 + i * _WEYL[0], k1 + i * _WEYL[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ r0) & _MASK, ((p0 >> 32) ^ c3 ^ r1) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
    return c0, c1, c2, c3


def words(seed: torch.Tensor, position: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """`[n, count]` int64 in 0..2^32-1: draws 0..count-1 of every row.

    Args:
        seed, position: `[n]` int32/int64, any value.
        stream: one of `SAMPLE`, `DRAFT`, `ACCEPT`, `RESIDUAL`, or the caller's own in 0..2^32-1.
        count: draws per row.
    """
    seed, position = seed.long()[:, None], position.long()[:, None]
    index = torch.arange((count + 3) // 4, device=seed.device)
    low, high = position & _MASK, (position >> 32) & _MASK
    out = philox4x32(index, torch.full_like(index, stream), low, high, seed & _MASK, (seed >> 32) & _MASK)
    return torch.stack(torch.broadcast_tensors(*out), dim=-1).flatten(1)[:, :count]


def to_uniform(word: torch.Tensor) -> torch.Tensor:
    """Words to float64 in [2^-33, 1 - 2^-33]: (w + 1/2) / 2^32, never 0 or 1."""
    return (word.double() + 0.5) * 2.0**-32


def uniform(seed: torch.Tensor, position: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """`[n, count]` float64 uniforms in (0, 1); arguments as in `words`."""
    return to_uniform(words(seed, position, stream, count))


def exponential(seed: torch.Tensor, position: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """`[n, count]` float64 standard exponentials, all positive and finite; arguments as in `words`.

    -log1p(-u) keeps the full resolution of u at its small end, where the race between vocabulary entries is decided.
    """
    return -torch.log1p(-uniform(seed, position, stream, count))


def round_position(anchor: torch.Tensor, row: torch.Tensor | int) -> torch.Tensor:
    """Position argument for draws that belong to one row (0..255) of one round, the round being named by its anchor.

    Drafts need it: which drafts of a round are kept can depend on the drafts after them (block verification), so the
    draw at a token position must not come back when a later round proposes for that position again.
    """
    return (anchor.long() << _ROW_BITS) + row
