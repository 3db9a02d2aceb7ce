"""Low-rank factors of a head: from calibration states, from training, in a file, in int8; and deflation."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dmtp_kernels.ops._checks import FLOAT_DTYPES, check_range
from dmtp_kernels.ops.lm_head.bounds import deflated_bounds
from dmtp_kernels.ops.lm_head.formats import quantize, row_chunks

_KEYS = ("down", "up")


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
            "lie and shortlists badly (recall@512 31 % at r = H/8 on a 49,152-row head; 93 % from hidden states)"
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
    return torch.linalg.eigh(states.T @ states).eigenvectors.flip(1)[:, :rank].T.contiguous()


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


def save_factors(path: str | os.PathLike[str], down: torch.Tensor, up: torch.Tensor) -> None:
    """Write trained factors, `down [r, H]` and `up [V, r]`, as one safetensors file, whole or not at all.

    Raises:
        ValueError: the ranks disagree.
        OSError: the file cannot be written; a file already there is left as it was.
    """
    from safetensors.torch import save

    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise ValueError(f"up: shape is {tuple(up.shape)}, must be [V, r] for down [r, H] {tuple(down.shape)}")
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(save({"down": down.detach().contiguous(), "up": up.detach().contiguous()}))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_factors(
    path: str | os.PathLike[str], *, rows: slice | None = None, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trained factors from a safetensors file, for `pack_lm_head(format="low_rank", factors=...)`.

    Args:
        path: a file with the tensors `down [r, H]` and `up [V, r]`, floating point.
        rows: the rows of `up` that this rank holds (default: all); only they are read.
        device: where the tensors go.

    Returns:
        `(down, up)`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, lacks a tensor, or the shapes or dtypes do not fit.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"path: {os.fspath(path)} is not a file")
    try:
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            missing = [k for k in _KEYS if k not in file.keys()]  # noqa: SIM118
            if missing:
                raise ValueError(f"path: {os.fspath(path)} has no tensor {missing[0]!r}, must hold 'down' and 'up'")
            down = file.get_tensor("down")
            up = file.get_tensor("up") if rows is None else file.get_slice("up")[rows]
    except SafetensorError as error:
        raise ValueError(f"path: {os.fspath(path)} is not a readable safetensors file: {error}") from error
    for name, tensor in (("down", down), ("up", up)):
        if tensor.dtype not in FLOAT_DTYPES or tensor.dim() != 2:
            raise ValueError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, must be a floating-point matrix")
    if down.shape[0] != up.shape[1]:
        raise ValueError(f"up: shape is {tuple(up.shape)}, must be [V, {down.shape[0]}] for down {tuple(down.shape)}")
    return down, up
