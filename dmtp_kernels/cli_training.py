"""`dmtp train` and `dmtp compare`: weights of the methods, and the table of what they reach."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels._cli_options import MOST_ROWS, CheckpointOption, JsonOption
from dmtp_kernels._files import check_directory, check_file
from dmtp_kernels.cli_formats import (
    BlockOption,
    DrafterOption,
    IdsFileOption,
    MTPOption,
    PromptOption,
    TargetOption,
    check_ids,
    given,
    held_out,
    load_drafts,
    read_prompts,
    runnable,
)
from dmtp_kernels.decode.evaluate import add_to_record, compare, read_record
from dmtp_kernels.decode.method import SHIPPED
from dmtp_kernels.decode.profile_files import figure_class
from dmtp_kernels.decode.stack import get_method
from dmtp_kernels.models.checkpoint import EMBEDDED
from dmtp_kernels.training.data import held_out_prompts

_NEW_TOKENS = 128


@one_line_errors
def compare_command(
    context: typer.Context,
    methods: Annotated[str, typer.Option(help="comma-separated (default: all shipped; of --target all it can run)")] = (
        ",".join(SHIPPED)
    ),
    prompts: Annotated[int, typer.Option(help="held-out prompts to use, 0 = all")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="tokens per prompt")] = _NEW_TOKENS,
    temperature: Annotated[float, typer.Option(help="greedy text of a tiny model loops; 0.6 and 1 say more")] = 0.6,
    batch: Annotated[int, typer.Option(help="requests decoded together")] = 8,
    seed: Annotated[int, typer.Option(help="seed of the first prompt")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="compare with autoregressive decoding; exit 1 on a mismatch")
    ] = False,
    agreement: Annotated[bool, typer.Option(help="measure teacher-forced agreement with the target")] = True,
    plot: Annotated[Path | None, typer.Option(help="write the two acceptance figures to a PNG")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="keep the figures in the checkpoint's training record")
    ] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="the ablation that `dmtp train --all` trained: page, figures and data in --out"),
    ] = False,
    runs: Annotated[Path, typer.Option(help="with --all: where it was trained")] = Path("runs/ablation"),
    out: Annotated[Path, typer.Option(help="with --all: directory of the page")] = Path("runs/ablation/results"),
    ids: PromptOption = None,
    ids_file: IdsFileOption = None,
    checkpoint: CheckpointOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    mtp: MTPOption = None,
    block_size: BlockOption = None,
    as_json: JsonOption = False,
) -> None:
    """Table of methods on the held-out prompts, or on --ids: acceptance, lengths, target forwards, speed."""
    _only(context, every, {"prompts", "max_new_tokens", "runs", "out"}, {"runs", "out"})
    most = len(held_out_prompts())
    if prompts < 0 or prompts > most:
        raise ValueError(f"prompts: is {prompts}, must be between 0 and {most}")
    if every:
        _compare_all(runs, out, prompts or most, max_new_tokens)
        return
    if not 1 <= batch <= MOST_ROWS:
        raise ValueError(f"batch: is {batch}, must be between 1 and {MOST_ROWS}")
    if plot is not None:
        check_file("plot", plot, (".png",))
        figure_class()
    if record:
        if target is not None:
            raise ValueError("record: is of a --checkpoint, --target has none")
        read_record(checkpoint or EMBEDDED)
    own = read_prompts(ids, ids_file)
    if own and prompts:
        raise ValueError("prompts: counts held-out prompts, give it or --ids and --ids-file")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise ValueError("methods: names none")
    drafters = [d for d in (get_method(name).drafter for name in names) if d is not None]
    models = load_drafts(checkpoint, drafters, target, drafter, mtp, block_size)
    if target is not None and not given(context, "methods"):
        names = runnable(models)
    if own:
        check_ids(models, own, models.target.config.max_positions)
    else:
        own = held_out(models)[: prompts or None]
    progress = _progress if not as_json and sys.stderr is not None and sys.stderr.isatty() else None
    result = compare(
        models,
        own,
        names,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch=batch,
        seed=seed,
        check=check,
        agreement=agreement,
        on_progress=progress,
    )
    if progress is not None:
        print(end="\r\x1b[K", file=sys.stderr)
    if as_json:
        print(json.dumps(result))
    else:
        from dmtp_kernels.decode.report import comparison_tables

        console = Console(width=None if sys.stdout.isatty() else 100)
        for table in comparison_tables(result):
            console.print(table)
    if record:
        add_to_record(checkpoint or EMBEDDED, result)
    if plot is not None:
        from dmtp_kernels.decode.report import plot_acceptance

        plot_acceptance(result, plot)
    if any(row.get("identical") is False for row in result["methods"].values()):
        raise typer.Exit(1)


@one_line_errors
def train_command(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option(help="run directory: training state, then the checkpoint (default: runs/tiny)")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of weights and data order")] = 0,
    budget: Annotated[str, typer.Option(help="full, or smoke for a few steps of every stage")] = "full",
    methods: Annotated[str, typer.Option(help="drafted methods, comma-separated (default: all shipped)")] = "",
    resume: Annotated[bool, typer.Option(help="go on where an interrupted run in the directory stopped")] = True,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="the ablation: every method, two starts, two seeds (default directory: runs/ablation)"
        ),
    ] = False,
) -> None:
    """Train the embedded checkpoint from scratch on the standard library's sources."""
    from dmtp_kernels.training.run import train as run_training

    _only(context, every, {"out", "budget", "resume"}, set())
    if every:
        from dmtp_kernels.training.ablation.train import train_all

        name = {"full": "ablation", "smoke": "ablation-smoke"}.get(budget, budget)
        for path in train_all(out or Path("runs/ablation"), budget=name, resume=resume):
            print(path)
        return

    names = [name.strip() for name in methods.split(",") if name.strip()] or None
    if methods and names is None:
        raise ValueError("methods: names none")
    print(run_training(out or Path("runs/tiny"), seed=seed, budget=budget, methods=names, resume=resume))


def _only(context: typer.Context, every: bool, with_all: set[str], no_other: set[str]) -> None:
    """Refuse options that were given and mean nothing with `--all`, or without it."""
    for name in context.params:
        here, option = given(context, name), name.replace("_", "-")
        if here and every and name not in {*with_all, "every"}:
            raise ValueError(f"{option}: means nothing with --all")
        if here and not every and name in no_other:
            raise ValueError(f"{option}: is for --all")


def _compare_all(runs: Path, out: Path, prompts: int, max_new_tokens: int) -> None:
    from dmtp_kernels.training.ablation.figures import check_matplotlib
    from dmtp_kernels.training.ablation.measure import measure_all
    from dmtp_kernels.training.ablation.page import write_page
    from dmtp_kernels.training.ablation.tables import Figures

    check_matplotlib()
    check_directory("out", out)
    result = measure_all(runs, prompts=prompts, max_new_tokens=max_new_tokens)
    print(write_page(result, out, _command(result, runs, out)))
    same, checked = Figures(result).identical
    if same != checked:
        raise typer.Exit(1)


def _command(result: dict[str, Any], runs: Path, out: Path) -> str:
    """The commands that give `result` again."""
    from dmtp_kernels.training.budget import BUDGETS

    train = ["train", "--all", "--out", str(runs)]
    if result["training"][0]["budget"] != asdict(BUDGETS["ablation"]):
        train += ["--budget", "smoke"]
    compare = ["compare", "--all", "--runs", str(runs), "--out", str(out)]
    if result["prompts"] != len(held_out_prompts()):
        compare += ["--prompts", str(result["prompts"])]
    if result["max_new_tokens"] != _NEW_TOKENS:
        compare += ["--max-new-tokens", str(result["max_new_tokens"])]
    return " && ".join(shlex.join(["dmtp", *part]) for part in (train, compare))


def _progress(name: str, done: int, total: int) -> None:
    print(f"\r\x1b[K{name}: {done} of {total} prompts", end="", file=sys.stderr, flush=True)
