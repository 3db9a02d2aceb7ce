"""`dmtp profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels._cli_options import MOST_ROWS, CheckpointOption, JsonOption
from dmtp_kernels._files import check_file
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
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.memory import check_fits
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.profile import WARMUP, profile_methods
from dmtp_kernels.decode.profile_files import check_trace, figure_class, plot_stages, trace_rounds
from dmtp_kernels.decode.profile_table import beside, conditions, overhead_table, own_share
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.stack import MAX_ROWS, get_method

TRACED = 8
"""Rounds in a trace."""


@one_line_errors
def profile_command(
    context: typer.Context,
    method: Annotated[str, typer.Option(help=f"one of {', '.join(METHODS)}")] = "dmtp",
    against: Annotated[
        str,
        typer.Option(
            help="method measured in turns with it, or none; the same as --method counts as none, as does the default "
            "where --target cannot run it"
        ),
    ] = "dflash",
    batch: Annotated[int, typer.Option(help="requests decoded together, all of them in every timed round")] = 8,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 1.0,
    verification: Annotated[str, typer.Option(help="target, rejection or block")] = "target",
    rounds: Annotated[int, typer.Option(help="timed rounds")] = 50,
    warmup: Annotated[int, typer.Option(help="rounds before them")] = WARMUP,
    graphs: Annotated[bool, typer.Option("--graphs", help="each stage a CUDA graph; eager without CUDA")] = False,
    trace: Annotated[
        Path | None, typer.Option(help=f"also write {TRACED} rounds of the method as a Chrome trace, .json or .json.gz")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="write the stages as stacked bars to a PNG")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda", show_default="cuda where there is such a device")
    ] = None,
    ids: PromptOption = None,
    ids_file: IdsFileOption = None,
    checkpoint: CheckpointOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    mtp: MTPOption = None,
    block_size: BlockOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time of a round by stage, beside another method, and how much of it the models take."""
    if not 1 <= batch <= MOST_ROWS:
        raise ValueError(f"batch: is {batch}, must be between 1 and {MOST_ROWS}")
    if rounds < 1:
        raise ValueError(f"rounds: is {rounds}, must be at least 1")
    if warmup < 0:
        raise ValueError(f"warmup: is {warmup}, must be at least 0")
    chosen = [get_method(method)]
    if against not in ("none", method):
        if against not in METHODS:
            raise ValueError(f"against: no method {against!r}, must be none or one of {', '.join(METHODS)}")
        chosen.append(METHODS[against])
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where not in ("cpu", "cuda"):
        raise ValueError(f"device: is {where!r}, must be cpu or cuda")
    if where == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: is 'cuda', no CUDA device is visible")
    if trace is not None:
        check_trace("trace", trace)
    if plot is not None:
        check_file("plot", plot, (".png",))
        figure_class()
    own = read_prompts(ids, ids_file)
    models = load_drafts(checkpoint, [m.drafter for m in chosen if m.drafter], target, drafter, mtp, block_size)
    if target is not None and not given(context, "against") and chosen[-1].name not in runnable(models):
        del chosen[1:]
    for module in models.modules().values():
        module.to(where)
    limit = models.target.config.max_positions - MAX_ROWS
    if own:
        check_ids(models, own, limit // 4)
    texts = own or held_out(models, limit // 4)
    if target is not None:
        # caches for as many positions as public models have would not fit
        limit = min(limit, max(map(len, texts)) + MAX_ROWS * (warmup + max(rounds, TRACED) + 1))
    check_fits("batch", batch, models, chosen, limit)
    if warmup >= (most := limit - max(map(len, texts))):
        raise ValueError(f"warmup: is {warmup}, must be below {most}, the tokens that a request decodes")
    requests = [Request(text := texts[i % len(texts)], limit - len(text), temperature, seed=i) for i in range(batch)]

    def engine(index: int) -> Engine:
        return Engine(models, chosen[index], max_batch=batch, max_tokens=limit, verification=verification)

    engines = [engine(index) for index in range(len(chosen))]
    results = profile_methods(engines, requests, rounds=rounds, warmup=warmup, graphs=graphs)
    del engines  # the trace has one of its own
    results = [found | {"temperature": temperature, "verification": verification} for found in results]
    if trace is not None:
        trace_rounds(engine(0), requests, trace, rounds=min(TRACED, rounds), warmup=warmup)
    if plot is not None:
        plot_stages(results[::-1], plot)
    found = beside(results[0], results[1] if len(results) > 1 else None)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(overhead_table(found))
    for line in (*map(own_share, results), conditions(results[0])):
        console.print(line, highlight=False)
