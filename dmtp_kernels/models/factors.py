"""Trained low-rank factors of a head in a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dmtp_kernels.ops._checks import FLOAT_DTYPES

_KEYS = ("down", "up")


def save_factors(path: str | os.PathLike[str], down: torch.Tensor, up: torch.Tensor) -> None:
    """Write trained factors, `down [r, H]` and `up [V, r]`, as one safetensors file, whole or not at all.

    Raises:
        ValueError: the ranks disagree.
        OSError: the file cannot be written; a file already there is left as it was.
    """
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
