"""`dmtp export`, and models in public formats for `dmtp generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels._cli_options import CheckpointOption
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.request import Completion
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.formats import export_trio, read_trio

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TargetOption = Annotated[Path | None, typer.Option(help="directory of a dense Qwen3 target, in place of a trio")]
DrafterOption = Annotated[Path | None, typer.Option(help="directory of a DFlash or DMTP drafter for it")]
MTPOption = Annotated[Path | None, typer.Option(help="directory whose mtp.* tensors are its MTP module")]
BlockOption = Annotated[int | None, typer.Option(help="slots of the drafter's block, fewer than it was trained with")]
IdsOption = Annotated[
    str | None, typer.Option(help="the prompt as token ids, 1,2,3, for a model that reads no bytes; prints ids")
]


@one_line_errors
def export_command(
    output: Annotated[Path, typer.Option(help="directory that gets target, mtp and drafter")],
    method: Annotated[str, typer.Option(help="whose drafter and fusion")] = "dmtp",
    dtype: Annotated[str, typer.Option(help=f"of the tensors: {', '.join(DTYPES)}")] = "float32",
    checkpoint: CheckpointOption = None,
) -> None:
    """Write a trio in public formats: dense Qwen3, Qwen3.5's MTP tensors, DFlash with a fusion."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: is {dtype!r}, must be one of {', '.join(DTYPES)}")
    places = export_trio(output, load_checkpoint(checkpoint, drafters=[method]), method, dtype=DTYPES[dtype])
    for place in (places.target, places.mtp, places.drafter):
        if place is not None:
            print(place)


def load_models(
    checkpoint: Path | None,
    method: Method,
    target: Path | None,
    drafter: Path | None,
    mtp: Path | None,
    block_size: int | None,
) -> Checkpoint:
    """The trio's file, or the directories. Raises ValueError on a mix of both."""
    if target is None:
        if drafter is not None or mtp is not None or block_size is not None:
            raise ValueError("target: is missing, must be given with --drafter, --mtp or --block-size")
        return load_checkpoint(checkpoint, drafters=[method.drafter] if method.drafter else [])
    if checkpoint is not None:
        raise ValueError("checkpoint: give --checkpoint or --target, not both")
    return read_trio(target, drafter, mtp, block_size=block_size)


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids of `1,2,3`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"ids: is {text[:80]!r}, must be numbers between commas") from None


def print_ids(completions: list[Completion]) -> None:
    """One line of ids a completion."""
    for completion in completions:
        print(",".join(map(str, completion.tokens)))
