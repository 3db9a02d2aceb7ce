"""The acceptance rules on the compiled CUDA kernels."""

from __future__ import annotations

import torch

from dmtp_kernels import backends


def accept_prefix(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_prefix`."""
    backends.cuda_library().accept_prefix(*arguments)
