"""Sampling on the compiled CPU kernel."""

from __future__ import annotations

from typing import Any

from dmtp_kernels import backends


def sample_rows(*arguments: Any) -> None:
    """As `reference.sample_rows`."""
    backends.compiled().sample_rows(*arguments)
