"""Options that several commands of `dmtp` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST_ROWS = 4096
"""Rows of one engine that the command line asks for at most."""

CheckpointOption = Annotated[Path | None, typer.Option(help="safetensors of another trio (default: the embedded one)")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON only")]
