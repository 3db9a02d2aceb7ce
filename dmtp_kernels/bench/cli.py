"""The `dmtp bench` commands."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels.bench.t1 import ENTRIES, bench_t1

bench_app = typer.Typer(no_args_is_help=True, help="time the ops against the eager chains they replace")


@bench_app.callback()
def _bench() -> None:
    """Keeps `t1` a subcommand while it is the only one."""


@bench_app.command("t1")
@one_line_errors
def t1(
    batch: Annotated[str, typer.Option(help="comma-separated batch sizes")] = "1,8",
    vocab: Annotated[int, typer.Option(help="rows of the head on this rank")] = 248_320,
    hidden: Annotated[int, typer.Option(help="hidden size, also of the drafter")] = 2048,
    rank: Annotated[int, typer.Option(help="rank of the low-rank head")] = 256,
    entries: Annotated[str, typer.Option(help=f"among {', '.join(ENTRIES)}")] = ",".join(ENTRIES),
    rounds: Annotated[int, typer.Option(help="timed rounds, interleaved over the entries")] = 15,
    threads: Annotated[int, typer.Option(help="CPU threads, 0 = torch's own choice")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """T1 preparation (select, embed, two norms, projection, block) by head format."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device: is {device!r}, must be cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device: is 'cuda', no CUDA device is visible")
    if threads < 0:
        raise ValueError(f"threads: is {threads}, must be at least 0")
    if threads:
        torch.set_num_threads(threads)
    try:
        batches = [int(b) for b in batch.split(",")]
    except ValueError:
        raise ValueError(f"batch: is {batch!r}, must be comma-separated whole numbers") from None
    report = bench_t1(batches, vocab, hidden, rank, entries.split(","), rounds, torch.device(device))
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        title=f"{report['cases'][0]['op']}, {report['device']}, {report['backend']}, {report['threads']} threads"
    )
    for name in ("B", "V", "H", "entry", "ms", "x eager", "GB/s", "% of bandwidth"):
        table.add_column(name, justify="left" if name == "entry" else "right")
    for case in report["cases"]:
        shape = case["shape"]
        table.add_row(
            *(str(shape[n]) for n in ("B", "V", "H")),
            case["entry"],
            f"{case['ms']:.2f}",
            f"{case['ratio_to_eager']:.2f}",
            f"{case['bytes'] / case['ms'] / 1e6:.1f}",
            f"{100 * case['share_of_bandwidth']:.0f}",
        )
    console.print(table)
    measured = ", ".join(f"{b:.1f}" for b in report["bandwidth_gb_s"])
    console.print(f"bandwidth measured in the same rounds: {measured} GB/s; medians of {report['rounds']} rounds")
    for entry, reason in report["skipped"].items():
        console.print(f"{entry}: not measured, {reason}")
