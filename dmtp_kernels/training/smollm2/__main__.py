"""`python -m dmtp_kernels.training.smollm2`: train, then measure on prompts that training leaves out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dmtp_kernels.models.checkpoint import CheckpointError
from dmtp_kernels.models.smollm2 import DRAFTERS
from dmtp_kernels.training.runner import TrainingError
from dmtp_kernels.training.smollm2.data import DataError
from dmtp_kernels.training.smollm2.measure import measure
from dmtp_kernels.training.smollm2.recipe import BUDGETS, train


def main(
    out: Annotated[Path, typer.Option(help="run directory: rollouts, state, then the weights")] = Path("runs/smollm2"),
    seed: Annotated[int, typer.Option(help="seed of weights, answers and data order")] = 0,
    budget: Annotated[str, typer.Option(help=f"one of {', '.join(BUDGETS)}")] = "full",
    resume: Annotated[bool, typer.Option(help="go on where an interrupted run in the directory stopped")] = True,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="put acceptance figures in the record")
    ] = True,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="train nothing: print the acceptance figures of the weights that ship")
    ] = False,
) -> None:
    """Train the drafters of SmolLM2 on its own answers, and write smollm2.safetensors and its record."""
    try:
        if shipped:
            measure(DRAFTERS, record=False, log=lambda line: print(line, flush=True))
            return
        path = train(out, seed=seed, budget=budget, resume=resume, log=lambda line: print(line, flush=True))
        if measured:
            measure(path, log=lambda line: print(line, flush=True))
    except (TrainingError, DataError, CheckpointError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(path)


if __name__ == "__main__":
    typer.run(main)
