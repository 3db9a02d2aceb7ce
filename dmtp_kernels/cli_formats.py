"""`dmtp export`, and models in public formats for the commands that run one."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels._cli_options import CheckpointOption
from dmtp_kernels.decode.method import METHODS, Method
from dmtp_kernels.decode.request import Completion
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.formats import export_trio, read_trio
from dmtp_kernels.models.presets import TARGET
from dmtp_kernels.training.data import held_out_prompts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TargetOption = Annotated[Path | None, typer.Option(help="directory of a dense Qwen3 target, in place of a trio")]
DrafterOption = Annotated[Path | None, typer.Option(help="directory of a DFlash or DMTP drafter for it")]
MTPOption = Annotated[Path | None, typer.Option(help="directory whose mtp.* tensors are its MTP module")]
BlockOption = Annotated[int | None, typer.Option(help="slots of the drafter's block, fewer than it was trained with")]
IdsOption = Annotated[
    str | None, typer.Option(help="the prompt as token ids, 1,2,3, for a model that reads no bytes; prints ids")
]
PromptOption = Annotated[str | None, typer.Option(help="a prompt as token ids, 1,2,3")]
IdsFileOption = Annotated[Path | None, typer.Option(help="file of prompts as token ids, 1,2,3, one a line")]
_NUMBER = re.compile(r"\s*-?[0-9]{1,18}\s*")
_MOST_BYTES = 1 << 26


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
    """The trio's file, or the directories, for one method. Raises ValueError as `load_drafts`."""
    return load_drafts(checkpoint, [method.drafter] if method.drafter else [], target, drafter, mtp, block_size)


def load_drafts(
    checkpoint: Path | None,
    drafters: Collection[str],
    target: Path | None,
    drafter: Path | None,
    mtp: Path | None,
    block_size: int | None,
) -> Checkpoint:
    """The trio's file with these drafters, or the directories. Raises ValueError on a mix of both."""
    if target is None:
        if drafter is not None or mtp is not None or block_size is not None:
            raise ValueError("target: is missing, must be given with --drafter, --mtp or --block-size")
        return load_checkpoint(checkpoint, drafters=drafters)
    if checkpoint is not None:
        raise ValueError("checkpoint: give --checkpoint or --target, not both")
    return read_trio(target, drafter, mtp, block_size=block_size)


def runnable(models: Checkpoint) -> list[str]:
    """Methods that have all they need."""
    return [
        name
        for name, method in METHODS.items()
        if (models.mtp is not None or not method.uses_mtp)
        and (method.drafter is None or method.drafter in models.drafters)
        and (method.fusion == "none" or name in models.fusions)
    ]


def read_prompts(ids: str | None, ids_file: Path | None) -> list[tuple[int, ...]]:
    """The prompts that `--ids` and `--ids-file` give, none where neither is given.

    Raises:
        ValueError: both are given, the file cannot be read or has no prompt, or a line of it is no list of ids.
    """
    if ids is not None and ids_file is not None:
        raise ValueError("ids: give --ids or --ids-file, not both")
    if ids is not None:
        return [parse_ids(ids)]
    if ids_file is None:
        return []
    try:
        with open(ids_file, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"ids-file: cannot read {ids_file}: {error.strerror or error}") from None
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"ids-file: {ids_file} is longer than {_MOST_BYTES} bytes")
    found = []
    for number, line in enumerate(raw.decode("ascii", "replace").splitlines(), 1):
        if line.strip():
            found.append(parse_ids(line, f"ids-file: line {number} of {ids_file}"))
    if not found:
        raise ValueError(f"ids-file: {ids_file} has no prompt")
    return found


def held_out(models: Checkpoint, most: int | None = None) -> list[tuple[int, ...]]:
    """The held-out texts as byte tokens, at most `most` of each. Raises ValueError for a model that reads no bytes."""
    vocabulary = models.target.config.vocab_size
    if vocabulary != TARGET.vocab_size:
        raise ValueError(
            f"ids: is missing, must be given, or --ids-file, for a model of {vocabulary} tokens that are not bytes"
        )
    return [tuple(prompt["text"].encode()[:most]) for prompt in held_out_prompts()]


def check_ids(models: Checkpoint, prompts: Sequence[tuple[int, ...]], most: int) -> None:
    """Raises ValueError where a prompt has ids outside the vocabulary or more than `most` of them."""
    vocabulary = models.target.config.vocab_size
    for number, prompt in enumerate(prompts, 1):
        if not all(0 <= token < vocabulary for token in prompt):
            raise ValueError(f"ids: prompt {number} has a token id outside 0..{vocabulary - 1}")
        if len(prompt) > most:
            raise ValueError(f"ids: prompt {number} has {len(prompt)} tokens, must have at most {most}")


def given(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def parse_ids(text: str, what: str = "ids:") -> tuple[int, ...]:
    """Token ids of `1,2,3`; `what` begins the error."""
    parts = text.split(",")
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise ValueError(f"{what} is {text[:80]!r}, must be numbers between commas")
    return tuple(map(int, parts))


def print_ids(completions: list[Completion]) -> None:
    """One line of ids a completion."""
    for completion in completions:
        print(",".join(map(str, completion.tokens)))
