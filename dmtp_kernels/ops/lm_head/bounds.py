"""Certificates: how far the score of a screen row can be from the canonical dot of its row."""

from __future__ import annotations

import torch

from dmtp_kernels.ops.lm_head.formats import dequantize, row_chunks

_UNIT = 2.0**-24
_SLACK = 1 + 2.0**-18


def row_bounds(weight: torch.Tensor, screen: tuple[torch.Tensor, torch.Tensor] | None, name: str) -> torch.Tensor:
    """`bound[V]` fp32 with `|canonical_dot(h, w_v) - screen score of v| <= bound[v] * ||h||`, rounded up.

    `||w_v - s_v||` bounds the exact difference (Cauchy-Schwarz); the rest covers the roundings of both dots for any
    summation order in fp32, of the hidden state to 24-bit fixed point, of applying the scale, and of forming the
    interval. A row with a non-finite weight gets inf. `screen` is `(codes, scale)`, or None when the rows are their own
    screen.
    """
    rows, hidden = weight.shape
    gamma = rounding(hidden)
    bound = torch.empty(rows, dtype=torch.float32, device=weight.device)
    for start, stop in row_chunks(rows, hidden):
        exact = weight[start:stop].to(torch.float64)
        if screen is None:
            total = gamma * exact.norm(dim=1)
        else:
            copy = dequantize(screen[0][start:stop], screen[1][start:stop], name, hidden).to(torch.float64)
            away = (exact - copy).norm(dim=1)
            total = away + gamma * (copy.norm(dim=1) + away)
        bound[start:stop] = _up(total, exact)
    return bound


def deflated_bounds(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, screen: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """`bound[V, 2]` fp32 of a deflated screen: `|error| <= bound[v, 0] * ||h'|| + bound[v, 1] * ||h||`, rounded up.

    With `z = down h` and `h' = h - down^T z` the score is `up_v z + s_v h'`, where s_v stands for the residual row
    `R_v = w_v - up_v down`. So the error is `(w_v down^T - up_v) z + up_v (down h') + (R_v - s_v) h'`, and
    `down h' = (1 - down down^T) z` vanishes as far as the rows of `down` are orthonormal.
    """
    rows, hidden = weight.shape
    gamma = 2 * rounding(hidden + down.shape[0])
    directions = down.to(torch.float64)
    skew = float((torch.eye(down.shape[0], dtype=torch.float64) - directions.cpu() @ directions.cpu().T).norm())
    bound = torch.empty(rows, 2, dtype=torch.float32, device=weight.device)
    for start, stop in row_chunks(rows, hidden):
        exact, factor = weight[start:stop].to(torch.float64), up[start:stop].to(torch.float64)
        copy = dequantize(screen[0][start:stop], screen[1][start:stop], "deflated", hidden).to(torch.float64)
        away = (exact - factor @ directions - copy).norm(dim=1)
        factors_away = (exact @ directions.T - factor).norm(dim=1) + skew * factor.norm(dim=1)
        rest = factors_away * (1 + skew) + gamma * (copy.norm(dim=1) + away + factor.norm(dim=1) + exact.norm(dim=1))
        bound[start:stop, 0] = _up(away, exact)
        bound[start:stop, 1] = _up(rest, exact)
    return bound


def rounding(terms: int) -> float:
    """Relative error of two fp32 dots of `terms` products each, in any order, with what surrounds them."""
    count = (2 * terms + 64) * _UNIT
    return count / (1 - count)


def _up(total: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    single = torch.where(exact.isfinite().all(dim=1), total * _SLACK, torch.inf).to(torch.float32)
    return torch.nextafter(single, torch.full_like(single, torch.inf))
