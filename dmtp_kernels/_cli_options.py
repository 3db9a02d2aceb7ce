"""Options that several commands of `dmtp` have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

MOST_ROWS = 4096
"""Rows of one engine that the command line asks for at most."""
MOST_THREADS = max(8, os.cpu_count() or 1)
"""CPU threads that a command line asks for at most; torch ends the process where the system has none to give."""

CheckpointOption = Annotated[Path | None, typer.Option(help="safetensors of another trio (default: the embedded one)")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON only")]


def set_threads(threads: int, *, option: str = "threads", least: int = 0) -> None:
    """Let torch use so many CPU threads; 0, where `least` allows it, leaves torch's own choice.

    Raises:
        ValueError: not between `least` and `MOST_THREADS`; names the option.
    """
    if not least <= threads <= MOST_THREADS:
        raise ValueError(f"{option}: is {threads}, must be between {least} and {MOST_THREADS}")
    if threads:
        torch.set_num_threads(threads)
