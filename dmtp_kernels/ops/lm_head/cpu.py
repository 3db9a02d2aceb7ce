"""The head's ops on the compiled CPU kernels; what these do not take (float64, `deflated`) goes to the reference."""

from __future__ import annotations

from typing import Any

from dmtp_kernels import backends
from dmtp_kernels.ops.lm_head import reference


def lm_head_select(*values: Any) -> None:
    """As `reference.lm_head_select`."""
    if not backends.compiled().lm_head_select(*values):
        reference.lm_head_select(*values)


def lm_head_screen(*values: Any) -> None:
    """As `reference.lm_head_screen`."""
    if not backends.compiled().lm_head_screen(*values):
        reference.lm_head_screen(*values)


def lm_head_rescore(*values: Any) -> None:
    """As `reference.lm_head_rescore`."""
    if not backends.compiled().lm_head_rescore(*values):
        reference.lm_head_rescore(*values)
