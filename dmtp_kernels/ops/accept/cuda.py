"""The acceptance rules on the compiled CUDA kernels."""

from __future__ import annotations

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._workspace import counters, workspace
from dmtp_kernels.ops.sample.cuda import COLUMNS

_REQUEST, _ROW, _CUT, _ROW_PART, _RACE_PART = 40, 64 + 8, 16, 48, 32
"""Bytes of the structs that csrc/cuda/accept_rows.cuh keeps."""


def accept_prefix(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_prefix`."""
    backends.cuda_library().accept_prefix(*arguments)


def accept_rejection(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_rejection`."""
    _accept_sampled(False, *arguments)


def accept_block(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_block`."""
    _accept_sampled(True, *arguments)


def _accept_sampled(block: bool, *arguments: torch.Tensor | None) -> None:
    logits = arguments[1]  # [B, R, V]
    assert logits is not None
    batch, rows, vocab = logits.shape
    parts = -(-vocab // COLUMNS)
    per_row = _ROW + _CUT + parts * _ROW_PART
    memory = workspace("accept_sampled", logits.device, batch * (_REQUEST + rows * per_row + parts * _RACE_PART))
    counted = counters("accept_sampled", logits.device, batch)
    backends.cuda_library().accept_sampled(block, *arguments, memory, counted)
