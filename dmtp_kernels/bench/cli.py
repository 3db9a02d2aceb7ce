"""The `dmtp bench` commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels.bench.attention import ENTRIES as attention_entries
from dmtp_kernels.bench.attention import Shape, bench_attention
from dmtp_kernels.bench.t1 import ENTRIES, bench_t1

bench_app = typer.Typer(no_args_is_help=True, help="time the ops against the eager chains they replace")


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
    where = _device(device, threads)
    batches = _whole_numbers("batch", batch)
    _show(bench_t1(batches, vocab, hidden, rank, entries.split(","), rounds, where), "BVH", as_json)


@bench_app.command("block_attention")
@one_line_errors
def attention(
    batch: Annotated[str, typer.Option(help="comma-separated batch sizes")] = "1,8",
    history: Annotated[str, typer.Option(help="comma-separated context rows before the block")] = "8192",
    heads: Annotated[str, typer.Option(help="query and kv heads")] = "16,2",
    dim: Annotated[int, typer.Option(help="head dimension")] = 256,
    slots: Annotated[int, typer.Option(help="queries a request, which are also the rows of its block")] = 8,
    window: Annotated[
        int | None,
        typer.Option(
            help="rows before the anchor that are seen, block both ways", show_default="all of them, block causal"
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(help="rows of a page")] = 16,
    entries: Annotated[
        str | None,
        typer.Option(
            help=f"among {', '.join(attention_entries)}", show_default="the backend that runs, eager, compiled"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds, interleaved over the entries")] = 15,
    threads: Annotated[int, typer.Option(help="CPU threads, 0 = torch's own choice")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Attention of a block over its paged context, against pages gathered for torch's attention with a mask."""
    where = _device(device, threads)
    counts = _whole_numbers("heads", heads)
    if len(counts) != 2:
        raise ValueError(f"heads: is {heads!r}, must be two numbers: query and kv heads")
    shapes = [
        Shape(b, h, slots, counts[0], counts[1], dim, page_size, window)
        for b in _whole_numbers("batch", batch)
        for h in _whole_numbers("history", history)
    ]
    report = bench_attention(shapes, None if entries is None else entries.split(","), rounds, where)
    _show(report, ("B", "history"), as_json)


def _device(name: str, threads: int) -> torch.device:
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device: is {name!r}, must be cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device: is 'cuda', no CUDA device is visible")
    if threads < 0:
        raise ValueError(f"threads: is {threads}, must be at least 0")
    if threads:
        torch.set_num_threads(threads)
    return torch.device(name)


def _whole_numbers(name: str, text: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: is {text!r}, must be comma-separated whole numbers") from None


def _show(report: dict[str, Any], sizes: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = Console()
    cases = report["cases"]
    fixed = ", ".join(f"{n} {v}" for n, v in cases[0]["shape"].items() if n not in sizes and v is not None)
    table = Table(
        title=f"{cases[0]['op']} ({fixed}), {report['device']}, {report['backend']}, {report['threads']} threads"
    )
    for name in (*sizes, "entry", "ms", "x eager", "GB/s", "% of bandwidth"):
        table.add_column(name, justify="left" if name == "entry" else "right")
    for case in report["cases"]:
        shape = case["shape"]
        table.add_row(
            *(str(shape[n]) for n in sizes),
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
