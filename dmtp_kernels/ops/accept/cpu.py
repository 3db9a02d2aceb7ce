"""The acceptance rules on the compiled CPU kernels."""

from __future__ import annotations

import torch

from dmtp_kernels import backends


def accept_prefix(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_prefix`."""
    backends.compiled().accept_prefix(*arguments)


def accept_rejection(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_rejection`."""
    backends.compiled().accept_sampled(False, *arguments)


def accept_block(*arguments: torch.Tensor | None) -> None:
    """As `reference.accept_block`."""
    backends.compiled().accept_sampled(True, *arguments)
