"""Low-rank factors of a head, given or from calibration states, and deflation."""

from __future__ import annotations

import torch

from dmtp_kernels.ops._checks import check_range
from dmtp_kernels.ops.lm_head.bounds import deflated_bounds
from dmtp_kernels.ops.lm_head.formats import quantize, row_chunks


def choose_factors(
    weight: torch.Tensor,
    calibration: torch.Tensor | None,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
    rank: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(down [r, H], up [V, r])`: the given ones, or the r principal directions of the calibration states."""
    if (calibration is None) == (factors is None):
        raise ValueError(
            "format 'low_rank' needs either calibration hidden states or trained factors, got "
            f"{'neither' if calibration is None else 'both'}: a plain SVD of the weight ignores where hidden states "
            "lie and shortlists badly (recall@512 31 % at r = H/8 on a 49,152-row head; 89 % from hidden states)"
        )
    if factors is not None:
        if rank is not None:
            raise ValueError("rank: is given with factors, whose shapes already fix it")
        down, up = factors
        return down.detach(), up.detach()
    assert calibration is not None
    hidden = weight.shape[1]
    directions = principal_directions(calibration, hidden, max(1, hidden // 4) if rank is None else rank)
    return directions.to(weight.dtype), project_rows(weight, directions).to(weight.dtype)


def principal_directions(calibration: torch.Tensor, hidden: int, rank: int) -> torch.Tensor:
    """The `rank` strongest orthonormal directions `[r, H]` float64 of the states, not centred."""
    if calibration.dim() != 2 or calibration.shape[1] != hidden or calibration.shape[0] == 0:
        raise ValueError(f"calibration: shape is {tuple(calibration.shape)}, must be [m, {hidden}] with m at least 1")
    states = calibration.detach().to(torch.float64)
    if not bool(states.isfinite().all()):
        raise ValueError("calibration: holds NaN or Inf, must be finite")
    check_range("rank", rank, 1, hidden)
    if states.shape[0] >= hidden:
        return torch.linalg.eigh(states.T @ states).eigenvectors.flip(1)[:, :rank].T.contiguous()
    # few states: their own decomposition is far smaller than that of an [H, H] matrix
    return torch.linalg.svd(states, full_matrices=rank > states.shape[0]).Vh[:rank].contiguous()


def project_rows(weight: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """`weight @ directions.T` `[V, r]` float64 rounded to fp32, in bounded scratch memory."""
    up = torch.empty(weight.shape[0], directions.shape[0], dtype=torch.float32, device=weight.device)
    for start, stop in row_chunks(*weight.shape):
        up[start:stop] = (weight[start:stop].to(torch.float64) @ directions.T).to(torch.float32)
    return up


def deflate(
    weight: torch.Tensor, calibration: torch.Tensor | None, rank: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(codes, scale, bound, down, up)` of a deflated screen: strong directions exact, the rest in six bits."""
    if calibration is None:
        raise ValueError("calibration: is None, format 'deflated' needs hidden states that the head consumes")
    hidden = weight.shape[1]
    down = principal_directions(calibration, hidden, max(1, hidden // 8) if rank is None else rank).to(torch.float32)
    up = project_rows(weight, down.to(torch.float64)).to(weight.dtype)
    residual = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for start, stop in row_chunks(*weight.shape):
        part = up[start:stop].to(torch.float64) @ down.to(torch.float64)
        residual[start:stop] = (weight[start:stop].to(torch.float64) - part).to(torch.float32)
    codes, scale = quantize(residual, "deflated")
    return codes, scale, deflated_bounds(weight, down, up, (codes, scale)), down, up
