"""What temperature, top-k and top-p make of a row of logits, shared by everything that samples."""

from __future__ import annotations

import torch


def scaled(
    logits: torch.Tensor,  # [n, V]
    temperature: torch.Tensor,  # [n]
) -> torch.Tensor:
    """`[n, V]` float64 log-weights (x - max x) / temperature: 0 at the largest, -inf where the logit is -inf.

    No NaN may be in `logits`. Rows whose maximum is not finite, and rows whose temperature is not positive and finite,
    come back all -inf except for the entries equal to the maximum, if that is +inf or the temperature 0.
    """
    x = logits.double()
    top = x.amax(dim=1, keepdim=True)
    # subtracting first keeps 1e-30 temperatures finite at the top
    below = torch.where(x == top, 0.0, x - top)
    usable = (temperature > 0) & torch.isfinite(temperature)
    weight = below / torch.where(usable, temperature.double(), 1.0)[:, None]
    degenerate = ~usable[:, None] | torch.isinf(top)
    weight = torch.where(degenerate & (below < 0), -torch.inf, weight)
    return torch.where(torch.isneginf(top), -torch.inf, weight)


def mass_bits(width: int) -> int:
    """Fractional bits of the integer masses that top-p adds up: the sum over `width` entries stays below 2^63."""
    return min(52, 62 - (width - 1).bit_length())


def truncated(
    weight: torch.Tensor,  # [n, V] float64
    logits: torch.Tensor,  # [n, V] without NaN
    top_k: torch.Tensor | None,  # [n]
    top_p: torch.Tensor | None,  # [n]
) -> torch.Tensor:
    """`weight` with -inf outside each row's top-k and, of those, outside its top-p.

    Entries are ranked by logit, equal ones by id. Top-k keeps the first k (k <= 0 or k >= V keeps all). Top-p keeps
    the shortest prefix of what top-k left whose share of the mass reaches p, at least one entry (p >= 1 keeps all). A
    mass is exp(weight) in integer units of 2^-mass_bits(V), so that sums are the same in any order.
    """
    if top_k is None and top_p is None:
        return weight
    width = weight.shape[1]
    ids = torch.sort(logits, dim=1, descending=True, stable=True).indices
    rank = torch.arange(width, device=weight.device)
    keep = torch.ones_like(weight, dtype=torch.bool)
    if top_k is not None:
        k = top_k.long()[:, None]
        keep = (rank < k) | (k <= 0)
    if top_p is not None:
        mass = torch.where(keep, (weight.gather(1, ids).exp() * 2.0 ** mass_bits(width) + 0.5).long(), 0)
        before = mass.cumsum(dim=1) - mass
        p = top_p.double().nan_to_num(nan=1.0).clamp(0.0, 1.0)[:, None]
        total = mass.sum(dim=1, keepdim=True)
        target = (p * total.double()).ceil().long().clamp(min=1)
        keep = keep & ((before < target) | (p >= 1))
    return torch.where(torch.zeros_like(keep).scatter(1, ids, keep), weight, -torch.inf)


def lowest_argmax(score: torch.Tensor) -> torch.Tensor:
    """`[n]` int64: min{i : score[i] == max(score)}; torch.argmax promises no order on CUDA."""
    ids = torch.arange(score.shape[1], device=score.device)
    return torch.where(score == score.amax(dim=1, keepdim=True), ids, score.shape[1]).amin(dim=1)


def race(
    weight: torch.Tensor,  # [n, V] float64 log-weights
    exponentials: torch.Tensor,  # [n, V] float64
) -> torch.Tensor:
    """`[n]` int64 ids drawn in proportion to exp(weight): the largest weight - log(exponential) wins.

    An entry of weight -inf never wins while another entry is finite, whatever its draw.
    """
    score = (weight - exponentials.log()).clamp(min=torch.finfo(torch.float64).min)
    return lowest_argmax(torch.where(torch.isneginf(weight), -torch.inf, score))
