"""Sampling one token per row of logits, keyed by (seed, position)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dmtp_kernels.ops.sample.op import SAMPLE_ROWS

NAN_IGNORED, NOTHING_TO_CHOOSE, BAD_PARAMETER = 1, 2, 4
"""Bits of `Sampled.status`."""


class Sampled(NamedTuple):
    """One token per row and what was wrong with the row."""

    token: torch.Tensor  # [n] int64
    status: torch.Tensor  # [n] int32


def sample_rows(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    num_valid: int | None = None,
    stream: int = 0,
) -> Sampled:
    """Draw one token per row; greedy where the temperature is 0.

    A row's draw depends on its logits, parameters, seed, position and `stream` only: the same token for any batch.

    Args:
        logits: `[n, V]` float, unnormalised; `[B, R, V]` of a round flattened to `[B*R, V]`, the parameters of each
            request repeated R times. NaN entries are ignored.
        temperature: `[n]` float, >= 0 and finite. 0 is greedy: no random number is used, nothing is divided.
        seed: `[n]` int32/int64.
        position: `[n]` int32/int64, the position of the token drawn (`token_positions` of
            `advance_round`, flattened). Drafts that rejection sampling judges take
            `philox.round_position(anchor, row)` instead (README.md says why).
        top_k: `[n]` int32/int64; <= 0 or >= V is off. Ties are cut by id, the lower one stays.
        top_p: `[n]` float; >= 1 is off, <= 0 keeps the best entry. Applied to what top-k left.
        num_valid: entries from `num_valid` on (vocabulary padding) are never read. Default V.
        stream: `philox.SAMPLE` (0) for the target's tokens, `philox.DRAFT` (1) for a drafter's.

    Returns:
        `Sampled(token, status)`: `[n]` int64 in 0..num_valid-1 or -1, and `[n]` int32 bits: 1, a NaN in the row was
        ignored; 2, no entry is above -inf: token -1; 4, the temperature is negative, NaN or infinite, or `top_p` of a
        row that samples is NaN: token -1. Greedy rows return the lowest id among the largest entries. An entry of +inf
        is the answer in both modes, the lowest one among several.

    Raises:
        ValueError, TypeError: a shape, dtype, stride or device is wrong; the message names the argument.

    Source: Gumbel-max sampling as an exponential race; Philox4x32-10 (philox.py); contract choices in README.md.
    """
    return Sampled(*SAMPLE_ROWS.call(logits, temperature, seed, position, top_k, top_p, num_valid, stream))


def check_temperature(values: Iterable[float], name: str = "temperature") -> None:
    """Raise `ValueError` unless every host value is a finite number >= 0; call it where requests enter."""
    for i, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}[{i}]: is {value}, must be finite and at least 0")
