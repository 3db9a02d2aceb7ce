"""The `dmtp bench` commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels._files import check_file, write_text
from dmtp_kernels.bench.attention import ENTRIES as attention_entries
from dmtp_kernels.bench.attention import Shape, bench_attention
from dmtp_kernels.bench.environment import open_device, run_tests
from dmtp_kernels.bench.ops import ENTRIES as op_entries
from dmtp_kernels.bench.ops import bench_ops
from dmtp_kernels.bench.progress import Progress
from dmtp_kernels.bench.t1 import ENTRIES, bench_t1

QUICK_SCALE, QUICK_ROUNDS = 64, 5

bench_app = typer.Typer(no_args_is_help=True, help="time the ops against the eager chains they replace")


@bench_app.command("t1")
@one_line_errors
def t1(
    batch: Annotated[str, typer.Option(help="comma-separated batch sizes")] = "1,8",
    vocab: Annotated[int, typer.Option(help="rows of the head on this rank")] = 248_320,
    hidden: Annotated[int, typer.Option(help="hidden size, also of the drafter")] = 2048,
    rank: Annotated[int, typer.Option(help="rank of the low-rank head")] = 256,
    entries: Annotated[str, typer.Option(help=f"among {', '.join(ENTRIES)}; eager always runs")] = ",".join(ENTRIES),
    rounds: Annotated[int, typer.Option(help="timed rounds, interleaved over the entries")] = 15,
    threads: Annotated[int, typer.Option(help="CPU threads, 0 = torch's own choice")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """T1 preparation (select, embed, two norms, projection, block) by head format."""
    where = open_device(device, threads)
    batches = _whole_numbers("batch", batch)
    progress = Progress()
    report = bench_t1(batches, vocab, hidden, rank, entries.split(","), rounds, where, say=progress)
    progress.done()
    _show(report, "BVH", as_json)


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
            help=f"among {', '.join(attention_entries)}; eager always runs",
            show_default="the backend that runs, eager, compiled",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds, interleaved over the entries")] = 15,
    threads: Annotated[int, typer.Option(help="CPU threads, 0 = torch's own choice")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Attention of a block over its paged context, against pages gathered for torch's attention with a mask."""
    where = open_device(device, threads)
    counts = _whole_numbers("heads", heads)
    if len(counts) != 2:
        raise ValueError(f"heads: is {heads!r}, must be two numbers: query and kv heads")
    shapes = [
        Shape(b, h, slots, counts[0], counts[1], dim, page_size, window)
        for b in _whole_numbers("batch", batch)
        for h in _whole_numbers("history", history)
    ]
    progress = Progress()
    report = bench_attention(shapes, None if entries is None else entries.split(","), rounds, where, say=progress)
    progress.done()
    _show(report, ("B", "history"), as_json)


@bench_app.command("ops")
@one_line_errors
def ops(
    op: Annotated[list[str] | None, typer.Option(help="an op, may be repeated", show_default="all")] = None,
    rounds: Annotated[int, typer.Option(help="turns of every entry of every case, a seating")] = 15,
    seconds: Annotated[float, typer.Option(help="begin further seatings, with inputs made anew, for so long")] = 0.0,
    scale: Annotated[int, typer.Option(help="divides vocabulary, history and window")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help=f"as --scale {QUICK_SCALE} --rounds {QUICK_ROUNDS}")] = False,
    entries: Annotated[str, typer.Option(help=f"among {', '.join(op_entries)}; op always runs")] = "op,eager",
    threads: Annotated[int, typer.Option(help="CPU threads, 0 = torch's own choice")] = 0,
    clock: Annotated[str | None, typer.Option(help="cpu or wall", show_default="cpu on one thread, else wall")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    tests: Annotated[bool, typer.Option("--tests", help="run the ops' tests first and record how they went")] = False,
    output: Annotated[Path | None, typer.Option(help="write the JSON here as well")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Every op at serving size against eager PyTorch; exit code 1 where an op's outputs are wrong."""
    where = open_device(device, threads)
    if output is not None:
        check_file("output", output)
    progress = Progress()
    if tests:
        progress("tests of the ops")
    tested = run_tests(op) if tests else None
    report = bench_ops(
        op,
        rounds=QUICK_ROUNDS if quick else rounds,
        seconds=seconds,
        scale=QUICK_SCALE if quick else scale,
        entries=entries.split(","),
        clock=clock,
        device=where,
        say=progress,
    )
    progress.done()
    report["tests"] = tested
    if output is not None:
        write_text("output", output, json.dumps(report) + "\n")
    if as_json:
        print(json.dumps(report))
    else:
        _show_ops(report)
    if not all(case["agrees"] for case in report["cases"]) or (tested is not None and not tested["passed"]):
        raise typer.Exit(1)


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


def _show_ops(report: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    where = report["environment"]
    table = Table(
        title=f"{where['device']}, {where['threads']} threads, {where['clock']} time, sizes over {where['scale']}"
    )
    baselines = [e for e in op_entries if any(e in case["speedup"] for case in report["cases"])]
    for name in ("op", "case", "runs", "ms", *(f"x {e}" for e in baselines), "floor, MB", "% of limit"):
        table.add_column(name, justify="left" if name in ("op", "case", "runs") else "right")
    for case in report["cases"]:
        median, q1, q3 = (case["entries"]["op"][key] for key in ("median", "q1", "q3"))
        speedups = [f"{case['speedup'][e]['median']:.2f}" if e in case["speedup"] else "-" for e in baselines]
        table.add_row(
            case["op"],
            case["case"],
            case["backend"],
            f"{median:.3f} ({q1:.3f}-{q3:.3f})",
            *speedups,
            f"{case['floor_bytes'] / 1e6:.3f}",
            f"{100 * case['share_of_bandwidth']:.0f}",
        )
    console.print(table)
    load = ", ".join(f"{x:.1f}" for x in where["load"])
    console.print(
        f"medians and quartiles; limit: floor over {report['bandwidth_gb_s']:.1f} GB/s, measured in the same turns; "
        f"load {load}; commit {where['commit']}"
    )
    for case in report["cases"]:
        if not case["agrees"]:
            console.print(f"WRONG {case['op']} {case['case']}: {case['disagreement']}")
    if report["tests"] is not None:
        console.print(f"tests: {report['tests']['summary']}")
