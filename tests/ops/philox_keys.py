"""Keys whose draws are the ends of the generator's range, found by search: (stream, position, draw) with seed 0."""

from __future__ import annotations

import torch

from dmtp_kernels.ops.sample import philox

SMALLEST = {philox.SAMPLE: (748582185, 0), philox.ACCEPT: (4867709066, 0), philox.RESIDUAL: (4063258450, 0)}
"""Stream -> position and index of a draw that is word 0."""
LARGEST = {philox.SAMPLE: (5306765133, 0), philox.ACCEPT: (5901427050, 0), philox.RESIDUAL: (5155284225, 0)}
"""Stream -> position and index of a draw that is word 2^32 - 1."""
TINY = {84170650: 1, 196927520: 4, 154737099: 19, 215005802: 22, 226627635: 54, 66330067: 89, 33008474: 228}
"""Position -> word of draw 0 of stream `SAMPLE`, all below 2^8: one step of a 24-bit uniform."""


def word(stream: int, position: int, index: int) -> int:
    """A draw of seed 0 by the reference's generator."""
    return int(philox.words(torch.zeros(1).long(), torch.tensor([position]), stream, index + 1)[0, index])
