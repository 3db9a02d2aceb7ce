"""Sampling on the compiled CUDA kernels: one launch, one more where rows are filtered."""

from __future__ import annotations

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._workspace import counters, workspace

COLUMNS = 2048
"""Entries of one block, as in csrc/cuda/logits.cuh."""
_CUT, _PART = 16, 32  # bytes of a row's cut, and of what a part of a row leaves


def sample_rows(
    logits: torch.Tensor,  # [n, V]
    temperature: torch.Tensor,  # [n]
    seed: torch.Tensor,  # [n]
    position: torch.Tensor,  # [n]
    top_k: torch.Tensor | None,  # [n]
    top_p: torch.Tensor | None,  # [n]
    num_valid: int | None,
    stream: int,
    token: torch.Tensor,  # [n] out
    status: torch.Tensor,  # [n] out
) -> None:
    """As `reference.sample_rows`."""
    rows, columns = logits.shape
    num_valid = columns if num_valid is None else num_valid
    parts = -(-num_valid // COLUMNS)
    backends.cuda_library().sample_rows(
        logits, temperature, seed, position, top_k, top_p, num_valid, stream, token, status,
        workspace("sample_rows", logits.device, rows * (_CUT + parts * _PART)),
        counters("sample_rows", logits.device, rows),
    )  # fmt: skip
