"""Experts stacked in one tensor, or in tensors of their own: `experts.17.gate_proj.weight`."""

from __future__ import annotations

import re

import torch

from dmtp_kernels.models.checkpoint import CheckpointError
from dmtp_kernels.models.formats.files import TensorFiles

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def take_experts(files: TensorFiles, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As `files.take`; a stack of experts that is not there is put together from each one's tensors.

    Raises CheckpointError: an expert's tensor is missing, of another shape or kind, or not finite.
    """
    match = _STACKED.fullmatch(name)
    if match is None or name in files.names or not _one_by_one(files, match[1]):
        return files.take(name, shape, dtype)
    count, parts = shape[0], _PARTS[match[2]]
    rows = shape[1] // len(parts)
    wanted = ((e, i, f"{match[1]}.{e}.{part}.weight") for e in range(count) for i, part in enumerate(parts))
    places = []
    # before memory is taken for as many as the configuration says
    for expert, index, each in wanted:
        if each not in files.names:
            raise CheckpointError(
                f"checkpoint {files.directory}: tensor {each} is missing, expected shape {[rows, shape[2]]}; the "
                f"configuration has {count} experts"
            )
        files.check(each, (rows, shape[2]))
        places.append((expert, index * rows, each))
    stack = torch.empty(shape, dtype=dtype)
    for expert, start, each in places:
        stack[expert, start : start + rows] = files.take(each, (rows, shape[2]), dtype)
    return stack


def _one_by_one(files: TensorFiles, prefix: str) -> bool:
    numbered = re.compile(re.escape(prefix) + r"\.\d")
    return any(numbered.match(name) for name in files.names)


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with every stack of experts as each one's own."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        parts = _PARTS[match[2]]
        for expert, weight in enumerate(tensor):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                found[f"{match[1]}.{expert}.{part}.weight"] = piece.clone()
    return found
